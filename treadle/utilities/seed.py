"""Names that scripts import from ``lightning.pytorch.utilities.seed``."""

from ..engine import isolated_random_state as isolate_rng
from ..engine import seed_everything

__all__ = ["isolate_rng", "seed_everything"]
