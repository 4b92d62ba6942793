"""Functions of ``accelerate.utils.fsdp_utils`` for models that Treadle's FSDP shards."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ..common.messages import name_type
from ..engine.checkpoint import filesystem
from ..engine.weights import open_weights, write_weights
from ..strategies.distributed import current_world, split_tied

_MODEL = "pytorch_model_fsdp"
_OPTIMIZER = "optimizer"
_KEYS = {_MODEL: "model", _OPTIMIZER: "optimizer"}  # of the states in a folder of shards
_NO_LIMIT = 2**63  # bytes; no file is larger


def enable_fsdp_ram_efficient_loading() -> None:
    """Set environment variables that make Transformers load weights only on the local rank zero of each machine."""
    os.environ.setdefault("ACCELERATE_USE_FSDP", "True")
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Set the environment variable that makes Transformers load weights on every rank."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "False"


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], nn.Module], model: nn.Module, device: torch.device | str
) -> Callable[[nn.Module], nn.Module]:
    """Return a function that calls ``param_init_fn`` and then ties the module's tied weights again.

    ``model._tied_weights_keys`` names the tied weights.
    """
    names: Iterable[str] = getattr(model, "_tied_weights_keys", None) or ()  # type: ignore[assignment]
    first: dict[int, Tensor | None] = {id(model.get_parameter(name)): None for name in names}
    if not first:
        return param_init_fn

    def initialize(module: nn.Module) -> nn.Module:
        keys = {name: id(parameter) for name, parameter in module.named_parameters(recurse=False)}
        module = param_init_fn(module)
        for name, key in keys.items():
            if key in first:
                first[key] = getattr(module, name) if first[key] is None else first[key]
                setattr(module, name, first[key])
        return module

    return initialize


def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """Shard a model with the accelerator's FSDP and return it; see `Accelerator.prepare_model`."""
    if not accelerator.is_fsdp2:
        raise ValueError(
            "the accelerator does not shard models. Create it with "
            "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())."
        )
    return accelerator.prepare_model(model)  # type: ignore[no-any-return]


def get_parameters_from_modules(modules: Any, model: nn.Module, device: Any) -> set[nn.Parameter]:
    """Return the parameters of ``modules``, an iterable or None.

    A pattern stands for the model's modules whose whole names match it, which are moved to ``device``.
    """
    if isinstance(modules, str):
        modules = [module.to(device) for name, module in model.named_modules() if re.fullmatch(modules, name)]
    return {parameter for module in modules or () for parameter in module.parameters()}


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write a sharded model's weights in Accelerate's format. Must be called on all ranks.

    Args:
        fsdp_plugin: Plugin whose ``state_dict_type`` selects one file with the full state, or a folder of shards. None
            means shards with ``fsdp_version=2``, otherwise the full state.
        accelerator: The accelerator that sharded the model.
        model: The sharded model.
        output_dir: The folder, which is created if it is missing.
        model_index: Index of the model in the names of files and folders. Default: 0.
        adapter_only: Whether to omit parameters that are not trainable. Default: False.
        use_dcp: Must be True (default), unless the full state is written.
    """
    full = _is_full(fsdp_plugin, use_dcp)
    module = accelerator.unwrap_model(model, keep_torch_compile=False)
    options = StateDictOptions(full_state_dict=full, cpu_offload=full, ignore_frozen_params=adapter_only)
    _write(accelerator, get_model_state_dict(module, options=options), Path(output_dir), _MODEL, model_index, full)


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Load weights that were saved by `save_fsdp_model` into a sharded model. Must be called on all ranks.

    The arguments are those of `save_fsdp_model`. With ``adapter_only``, weights that are missing in the checkpoint are
    kept. The missing and unexpected keys are returned.
    """
    full = _is_full(fsdp_plugin, use_dcp)
    module = accelerator.unwrap_model(model, keep_torch_compile=False)
    options = StateDictOptions(full_state_dict=full, ignore_frozen_params=adapter_only)
    state = {} if full else get_model_state_dict(module, options=options)
    state = _read(accelerator, state, Path(input_dir), _MODEL, model_index, full)
    with current_world().failing_together():
        if full and accelerator.is_main_process:
            if not adapter_only:
                _refuse_missing(module, state)
            _refuse_other_shapes(module, state)
    shared = full and current_world().size > 1
    options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=shared, strict=not adapter_only)
    return set_model_state_dict(module, state, options=options)


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write the state of a sharded model's optimizer to a file or folder. Must be called on all ranks.

    The arguments are those of `save_fsdp_model`.
    """
    full = _is_full(fsdp_plugin, use_dcp)
    module = accelerator.unwrap_model(model, keep_torch_compile=False)
    options = StateDictOptions(full_state_dict=full, cpu_offload=full)
    state = get_optimizer_state_dict(module, _get_plain_optimizer(optimizer), options=options)
    _write(accelerator, state, Path(output_dir), _OPTIMIZER, optimizer_index, full)


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load the optimizer state that `save_fsdp_optimizer` wrote. Must be called on all ranks."""
    full = _is_full(fsdp_plugin, use_dcp)
    module = accelerator.unwrap_model(model, keep_torch_compile=False)
    plain = _get_plain_optimizer(optimizer)
    state = {} if full else get_optimizer_state_dict(module, plain, options=StateDictOptions())
    state = _read(accelerator, state, Path(input_dir), _OPTIMIZER, optimizer_index, full)
    options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=full and accelerator.num_processes > 1)
    set_optimizer_state_dict(module, plain, state, options=options)
    accelerator.wait_for_everyone()


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Merge a sharded checkpoint into one file on rank zero. The other ranks wait.

    Args:
        checkpoint_dir: A checkpoint of Treadle, or a folder of ``torch.distributed.checkpoint``, whose index is
            unpickled, which may run code.
        output_path: The folder for the file, which is created if it is missing.
        safe_serialization: Whether to write ``model.safetensors`` instead of ``pytorch_model.bin``. Default: True.
        remove_checkpoint_dir: Whether to delete ``checkpoint_dir`` afterwards. Default: False.

    Raises:
        ValueError: If the folder is not a checkpoint of a model's weights.
    """
    world = current_world()
    with world.failing_together():
        if world.rank == 0:
            _merge(Path(checkpoint_dir), Path(output_path), safe_serialization)
            if remove_checkpoint_dir:
                shutil.rmtree(checkpoint_dir)


def _merge(folder: Path, output: Path, safe_serialization: bool) -> None:
    if not folder.is_dir():
        raise ValueError(f"checkpoint_dir={str(folder)!r} is not an existing folder. Pass the folder of a checkpoint.")
    if (folder / f"{_MODEL}_0").is_dir():
        weights_folder = str(folder / f"{_MODEL}_0")
        raise ValueError(
            f"checkpoint_dir={str(folder)!r} is not a checkpoint, but contains one. Pass {weights_folder!r}."
        )
    if (folder / f"{_OPTIMIZER}_0").is_dir():
        raise ValueError(
            f"checkpoint_dir={str(folder)!r} contains only optimizer state. Pass the folder of a model's weights."
        )
    if (folder / ".metadata").is_file():
        weights = _merge_distributed(folder)
    else:
        weights = {name: piece.get() for name, piece in open_weights(folder).items()}
    others = [name for name, value in weights.items() if not isinstance(value, Tensor)]
    if others:
        raise ValueError(
            f"checkpoint_dir={str(folder)!r} contains {others[0]!r}, which is {name_type(weights[others[0]])}, not "
            "a tensor. Pass the folder of a model's weights."
        )
    write_weights(*split_tied(weights), output, _NO_LIMIT, safe_serialization)


def _merge_distributed(folder: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="treadle-") as scratch:
        path = Path(scratch) / "merged.bin"
        dcp_to_torch_save(folder, path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    return next(iter(state.values())) if len(state) == 1 else state  # type: ignore[no-any-return]


def _get_plain_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    return getattr(optimizer, "optimizer", optimizer)  # type: ignore[no-any-return]


def _is_full(plugin: Any, use_dcp: bool) -> bool:
    kind = getattr(plugin, "state_dict_type", None)
    default = "SHARDED_STATE_DICT" if getattr(plugin, "fsdp_version", None) == 2 else "FULL_STATE_DICT"
    name = str(getattr(kind, "name", kind or default))
    if name == "LOCAL_STATE_DICT" or not (use_dcp or name == "FULL_STATE_DICT"):
        raise ValueError(
            f"state_dict_type={name} with use_dcp={use_dcp} uses one file per rank, and only the same number of "
            "ranks can load these files. Use accelerator.save_state and accelerator.load_state, which support any "
            "number of ranks."
        )
    return name == "FULL_STATE_DICT"


def _refuse_missing(module: nn.Module, state: dict[str, Any]) -> None:
    tensors = module.state_dict(keep_vars=True)
    present = {id(tensor) for name, tensor in tensors.items() if name in state}
    missing = [name for name, tensor in tensors.items() if name not in state and id(tensor) not in present]
    if missing:
        listed = ", ".join(missing[:8]) + ", ..." * (len(missing) > 8)
        raise ValueError(
            f"the saved weights lack {listed} of {type(module).__name__}. Load them into the model that was saved, or "
            "pass adapter_only=True to keep the current values of missing weights."
        )


def _refuse_other_shapes(module: nn.Module, state: Mapping[str, Any]) -> None:
    for name, tensor in module.state_dict(keep_vars=True).items():
        value = state.get(name)
        if isinstance(tensor, Tensor) and isinstance(value, Tensor) and value.shape != tensor.shape:
            raise ValueError(
                f"{name} has the shape {tuple(value.shape)} in the state, but {tuple(tensor.shape)} in "
                f"{type(module).__name__}. Pass the state of the same model."
            )


def _name_file(stem: str, index: int) -> str:
    return f"{stem}.bin" if index == 0 else f"{stem}_{index}.bin"


def _write(accelerator: Any, state: dict[str, Any], folder: Path, stem: str, index: int, full: bool) -> None:
    with current_world().failing_together():
        filesystem.make_directory(folder)
        if full and accelerator.is_main_process:
            torch.save(state, folder / _name_file(stem, index))
    if not full:
        checkpoint.save({_KEYS[stem]: state}, checkpoint_id=folder / f"{stem}_{index}")
        accelerator.wait_for_everyone()


def _read(accelerator: Any, state: dict[str, Any], folder: Path, stem: str, index: int, full: bool) -> dict[str, Any]:
    accelerator.wait_for_everyone()
    if not full:
        inside = f"{stem}_{index}"
        checkpoint.load({_KEYS[stem]: state}, checkpoint_id=folder if folder.name == inside else folder / inside)
        return state
    with current_world().failing_together():
        if accelerator.is_main_process:
            state = torch.load(folder / _name_file(stem, index), map_location="cpu", weights_only=True)
    return state
