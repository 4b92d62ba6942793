"""Data loading: the order of samples, their distribution over ranks, and their division into micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .batch_digest import digest
    from .combined_loader import CombinedLoader, is_collection
    from .device_transfer import choose_mover
    from .joint_loader import JointLoader
    from .loader import Loader, batch_indices
    from .micro_batches import Cursor, Micro, share
    from .sampler_rng import preserve_loader_state
    from .seedable_sampler import replace_random_sampler
    from .sharded_sampler import get_length, shards_itself
    from .skip_batches import skip_first_batches
    from .stream_end import Outlook
    from .streamed_batches import has_user_iter

__getattr__, __dir__, __all__ = lazy_exports(__name__)
