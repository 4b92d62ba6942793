"""Names that scripts import from ``lightning.pytorch.utilities.seed``."""

from contextlib import AbstractContextManager

from ..engine import isolated_random_state, seed_everything


def isolate_rng(include_cuda: bool = True) -> AbstractContextManager[None]:
    """Return a context that restores the process's random number generators on exit.

    Args:
        include_cuda: Accepted and ignored; the generators of CUDA are included if CUDA is in use.
    """
    return isolated_random_state()


__all__ = ["isolate_rng", "seed_everything"]
