"""Inference with models larger than one device's memory: meta device, device maps, loading and offloading."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ..quantization import WeightQuantizer
    from .device_map import (
        check_device_map,
        clean_device_map,
        device_map_plan,
        get_balanced_memory,
        infer_auto_device_map,
        look_up_device,
    )
    from .dispatch import (
        cpu_offload,
        cpu_offload_with_hook,
        disk_offload,
        dispatch_model,
        find_loading_hooks,
        is_dispatched,
        list_offloaded,
        remove_hook_from_submodules,
    )
    from .empty_init import init_empty_weights, init_on_device
    from .hooks import OffloadedTensor, load_all, make_placeholder, move, release_all, restore
    from .load_checkpoint import load_checkpoint_and_dispatch, load_checkpoint_in_model
    from .memory import get_max_memory, is_accelerator, resolve
    from .model_hooks import (
        CpuOffload,
        ModelHook,
        SequentialHook,
        UserCpuOffloadHook,
        add_hook_to_module,
        remove_hook_from_module,
    )
    from .module_sizes import compute_module_sizes
    from .module_tensors import (
        copy_attributes,
        group_tied_names,
        iter_direct_tensors,
        named_tensors,
        set_tensor,
        set_tensor_by_names,
    )
    from .offload_file import share_tied_values

__getattr__, __dir__, __all__ = lazy_exports(__name__)
