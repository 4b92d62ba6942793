"""Models larger than one device's memory, for inference: built empty, planned, loaded in place, run part by part."""

from .dispatch import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    is_dispatched,
    remove_hook_from_submodules,
)
from .empty import init_empty_weights, init_on_device
from .hooks import UserCpuOffloadHook
from .load import load_checkpoint_and_dispatch, load_checkpoint_in_model
from .memory import get_max_memory
from .plan import check_device_map, clean_device_map, get_balanced_memory, infer_auto_device_map
from .report import device_map_plan
from .sizes import compute_module_sizes

__all__ = [
    "UserCpuOffloadHook",
    "check_device_map",
    "clean_device_map",
    "compute_module_sizes",
    "cpu_offload",
    "cpu_offload_with_hook",
    "device_map_plan",
    "disk_offload",
    "dispatch_model",
    "get_balanced_memory",
    "get_max_memory",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "is_dispatched",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "remove_hook_from_submodules",
]
