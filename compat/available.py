"""Accelerate's queries about installed packages and hardware."""

from __future__ import annotations

import importlib
import importlib.metadata
import operator
from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version, parse

from ..common.optional import is_installed
from ..common.validation import choose

_COMPARE: dict[str, Callable[[Version, Version], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Return whether a version, or the version of an installed library, satisfies a comparison.

    Args:
        library_or_version: A ``packaging`` ``Version``, or the name under which pip lists a library.
        operation: ``"<"``, ``"<="``, ``"=="``, ``"!="``, ``">="`` or ``">"``.
        requirement_version: The version on the right-hand side.

    Raises:
        ValueError: If the operation or ``requirement_version`` is invalid.
        PackageNotFoundError: If the library is not installed.
    """
    compare = _COMPARE[choose("operation", operation, _COMPARE)]
    version = library_or_version
    if isinstance(version, str):
        version = parse(importlib.metadata.version(version))
    return compare(version, parse(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Return whether torch's version, without suffixes such as ``+cu128``, satisfies a comparison.

    Args:
        operation: See `compare_versions`.
        version: The version on the right-hand side.
    """
    return compare_versions(parse(parse(torch.__version__).base_version), operation, version)


def is_cuda_available() -> bool:
    """Return whether torch can use a CUDA device."""
    return torch.cuda.is_available()


def num_cuda_devices() -> int:
    """Return the number of CUDA devices that torch can use."""
    return torch.cuda.device_count()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether torch can use an Apple GPU.

    Args:
        min_version: Accepted and ignored.
    """
    return torch.backends.mps.is_available()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether the current CUDA device supports bfloat16 without emulation; True if there is no CUDA device.

    Args:
        ignore_tpu: Accepted and ignored.
    """
    return torch.cuda.is_bf16_supported(including_emulation=False) if torch.cuda.is_available() else True


def is_fp16_available() -> bool:
    """Return True, because float16 works on every device."""
    return True


def is_torch_distributed_available() -> bool:
    """Return whether torch was built with ``torch.distributed``."""
    return torch.distributed.is_available()


def is_rocm_available() -> bool:
    """Return whether torch can use an AMD GPU."""
    return torch.version.hip is not None and torch.cuda.is_available()


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Return whether NumPy ``min_version`` or later is installed."""
    return _is_version_installed("numpy", min_version)


def is_4bit_bnb_available() -> bool:
    """Return whether ``bitsandbytes`` supports 4-bit weights (version 0.39.0 or later)."""
    return _is_version_installed("bitsandbytes", "0.39.0")


def is_8bit_bnb_available() -> bool:
    """Return whether ``bitsandbytes`` supports 8-bit weights (version 0.37.2 or later)."""
    return _is_version_installed("bitsandbytes", "0.37.2")


def is_torchdata_stateful_dataloader_available() -> bool:
    """Return whether ``torchdata`` has ``StatefulDataLoader`` (version 0.8.0 or later)."""
    return _is_version_installed("torchdata", "0.8.0")


def is_pynvml_available() -> bool:
    """Return whether ``pynvml`` is installed."""
    return is_installed("pynvml")


def _is_version_installed(package: str, version: str) -> bool:
    return is_installed(package) and compare_versions(package, ">=", version)


def _make_never_available(kind: str) -> Callable[..., bool]:
    def available(*args: Any, **kwargs: Any) -> bool:
        return False

    available.__doc__ = (
        f"Return False, because Treadle does not use {kind}.\n\n"
        "Args:\n    *args: Accepted and ignored.\n    **kwargs: Accepted and ignored.\n"
    )
    return available


is_tpu_available = is_torch_xla_available = _make_never_available("TPUs")
is_npu_available = _make_never_available("Ascend NPUs")
is_mlu_available = _make_never_available("Cambricon MLUs")
is_musa_available = _make_never_available("Moore Threads GPUs")
is_sdaa_available = _make_never_available("Tecorigin accelerators")
is_hpu_available = _make_never_available("Habana accelerators")
is_xpu_available = _make_never_available("Intel GPUs")
is_neuron_available = _make_never_available("AWS Neuron")
is_xccl_available = _make_never_available("Intel GPUs")
is_habana_gaudi1 = _make_never_available("Habana accelerators")
is_sagemaker_available = _make_never_available("SageMaker's launcher")
is_deepspeed_available = _make_never_available("DeepSpeed")
is_megatron_lm_available = _make_never_available("Megatron-LM")
is_msamp_available = _make_never_available("MS-AMP")
is_transformer_engine_available = is_transformer_engine_mxfp8_available = _make_never_available("Transformer Engine")


def _make_is_installed(module: str) -> Callable[[], bool]:
    def available() -> bool:
        return is_installed(module)

    available.__doc__ = f"Return whether ``{module}`` is installed."
    return available


is_amdsmi_available = _make_is_installed("amdsmi")
is_boto3_available = _make_is_installed("boto3")
is_import_timer_available = _make_is_installed("import_timer")
is_lomo_available = _make_is_installed("lomo_optim")
is_pytest_available = _make_is_installed("pytest")
is_torchao_available = is_fp8_available = _make_is_installed("torchao")
is_tqdm_available = _make_is_installed("tqdm")
is_aim_available = _make_is_installed("aim")
is_bnb_available = _make_is_installed("bitsandbytes")
is_clearml_available = _make_is_installed("clearml")
is_comet_ml_available = _make_is_installed("comet_ml")
is_datasets_available = _make_is_installed("datasets")
is_dvclive_available = _make_is_installed("dvclive")
is_matplotlib_available = _make_is_installed("matplotlib")
is_mlflow_available = _make_is_installed("mlflow")
is_pandas_available = _make_is_installed("pandas")
is_peft_available = _make_is_installed("peft")
is_rich_available = _make_is_installed("rich")
is_schedulefree_available = _make_is_installed("schedulefree")
is_swanlab_available = _make_is_installed("swanlab")
is_tensorboard_available = _make_is_installed("tensorboard")
is_timm_available = _make_is_installed("timm")
is_torchdata_available = _make_is_installed("torchdata")
is_torchvision_available = _make_is_installed("torchvision")
is_trackio_available = _make_is_installed("trackio")
is_transformers_available = _make_is_installed("transformers")
is_triton_available = _make_is_installed("triton")
is_wandb_available = _make_is_installed("wandb")
