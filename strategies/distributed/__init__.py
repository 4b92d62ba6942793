"""Processes of a run: their ranks, their communication, and checks that their calls match."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from . import process_group
    from .devices import ACCELERATORS, Devices, device_of, device_type, parse_devices
    from .fixed_tree import FixedTree, PartialSums
    from .gradient_norm import clip_to_norm
    from .launch_environment import (
        LaunchEnvironment,
        is_ray_worker,
        variables_set,
        without_launch_variables,
    )
    from .open_world import (
        DistributedType,
        backend_of,
        connected,
        current_place,
        current_world,
        distributed_type,
        open_world,
    )
    from .process_group import disconnect
    from .retry import DONE, RETRY, Attempts
    from .tensors import (
        Whole,
        count_shards,
        cut_like,
        gather_parameters,
        get_original_class,
        is_sharded,
        keep_random_state,
        local,
        make_view_key,
        map_whole,
        piece_of,
        split_tied,
        strip_compile_prefix,
        view_bytes,
        whole,
    )
    from .tracebacks import PeerFailed, format_error, hide_frames
    from .training_clock import name_phase
    from .waiting_call import DistributedOperationException, mark_exchange
    from .watchdog import HUNG, PassedMeeting, Watchdog, watch
    from .world import REPLICATE, SHARD, TENSOR, Layout, World

__getattr__, __dir__, __all__ = lazy_exports(__name__)
