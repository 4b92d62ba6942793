"""Checks of a model against a checkpoint: names, shapes, dtypes and classes, and digests of frozen weights."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from xxhash import xxh3_64

from ...common.messages import abbreviate, name_type, warn
from ...common.remote_path import AnyPath
from ...strategies import World
from ...strategies.distributed import local, strip_compile_prefix, view_bytes, whole
from .content import FROZEN_NOTE, MODULES_NOTE, list_part_kinds
from .filesystem import RESTORE

_SHOWN = 10

# A resumed ``fit`` has no argument ``strict``.
TO_LOAD_WHAT_FITS = "To load what fits, set strict_loading = False in the task (own loop: load_state(strict=False))."


class FrozenWeights:
    """Digests of a model's frozen parameters, which a checkpoint may store instead of the parameters.

    A parameter that was trainable, or had other values, at an earlier call of `update` no longer counts as frozen.
    """

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}
        self._sums: dict[str, int] = {}
        self._trained: set[str] = set()

    def update(self, model: nn.Module, world: World) -> dict[str, str]:
        """Return the digest of each frozen parameter by name. Call this method on all ranks.

        A digest is computed again only if the sum of the parameter's bits has changed. ``_version`` does not reveal
        such a change, because fused optimizers do not increment it.
        """
        parameters = {strip_compile_prefix(n): p for n, p in model.named_parameters(remove_duplicate=False)}
        self._trained |= {name for name, parameter in parameters.items() if parameter.requires_grad}
        frozen = {name: p for name, p in parameters.items() if name not in self._trained}
        sums = _sum_bits(frozen)
        changed = [name for name, total in sums.items() if self._sums.get(name) != total]
        # A shard may change on one rank alone, but all ranks must gather the same parameters.
        names = set[str]().union(*world.gather_objects(changed))
        for name, digest in compute_digests(model, names, world).items():
            if self._digests.setdefault(name, digest) != digest:
                self._trained.add(name)
        self._sums = sums
        return {name: self._digests[name] for name in frozen if name not in self._trained}


def compute_digests(model: nn.Module, names: Collection[str], world: World) -> dict[str, str]:
    """Return the digests of parameters by name, the same on all processes. Call it with the same names on all ranks."""
    digests = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (plain_name := strip_compile_prefix(name)) in names:
            value = whole(parameter, keep=world.is_main)
            if world.is_main:
                digests[plain_name] = _digest(value)
    return cast(dict[str, str], world.broadcast(digests))


def digest_parameters(models: Iterable[nn.Module], world: World) -> str:
    """Return a digest of all parameters' bits, the same for full and sharded ones. Must be called on all ranks."""
    total = xxh3_64()
    for model in models:
        names = {strip_compile_prefix(name) for name, _ in model.named_parameters(remove_duplicate=False)}
        total.update(repr(sorted(compute_digests(model, names, world).items())).encode())
    return total.hexdigest()


def _sum_bits(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return for each tensor the sum of its elements' bits, read as integers."""
    sums = {name: torch.stack([_add_bits(part) for part in _flatten(local(t))]).sum() for name, t in tensors.items()}
    if not sums:
        return {}
    # One copy to the host for all sums, instead of one per parameter.
    device = next(iter(sums.values())).device
    return dict(zip(sums, torch.stack([total.to(device) for total in sums.values()]).tolist(), strict=True))


def _add_bits(tensor: Tensor) -> Tensor:
    # As integers: a sum of floats rounds small changes away, and NaN is not equal to itself.
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    wide = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()]
    return plain.contiguous().view(wide).sum(dtype=torch.int64)


def _flatten(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a tensor consists of; for a quantized one, its integers and scales."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor.detach()]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _flatten(getattr(tensor, name))]


def _digest(tensor: Tensor) -> str:
    digest = xxh3_64()
    for part in _flatten(tensor):
        plain = part.resolve_conj().resolve_neg().cpu().contiguous()
        # Zeros of one shape or dtype are the same bytes as those of another.
        digest.update(repr((tuple(plain.shape), str(plain.dtype))).encode())
        digest.update(memoryview(view_bytes(plain).numpy()))  # type: ignore[arg-type]
    return digest.hexdigest()


def read_frozen_note(noted: Mapping[str, str], path: AnyPath | str) -> dict[str, str]:
    """Return the digests of the weights that a checkpoint omits, by name; empty for a complete checkpoint.

    Raises:
        ValueError: If the note is damaged.
    """
    try:
        digests = json.loads(noted.get(FROZEN_NOTE, "{}"))
    except ValueError:
        digests = None
    if not isinstance(digests, dict) or not all(isinstance(digest, str) for digest in digests.values()):
        raise ValueError(f"{path}: the list of frozen weights is damaged. {RESTORE}")
    return digests


def check_frozen(current: Mapping[str, str], saved: Mapping[str, str], path: AnyPath | str, strict: bool) -> None:
    """Check that a model has the same frozen weights as the model that was saved in a checkpoint.

    ``current`` are the digests of the model's parameters with the names in ``saved``.

    Raises:
        ValueError: If some of these weights are missing or have other values. Without ``strict``, this is a warning.
    """
    other = [name for name, digest in saved.items() if current.get(name) != digest]
    if not other:
        return
    text = (
        f"{path} contains only trained weights, but this model has different values for frozen weights that the "
        f"checkpoint omits ({len(other)} of {len(saved)}): {abbreviate(other, 5)}. Build the model from the same "
        "pretrained weights in the same precision"
    )
    if strict:
        raise ValueError(
            f"{text}. To load the checkpoint anyway, set strict_loading = False in the task (own loop: "
            "load_state(strict=False))."
        )
    warn(f"{text}.")


def compare(model: nn.Module, noted: Mapping[str, str], path: AnyPath) -> None:
    """Warn if weights were saved by a model in which submodules with the same names have other classes."""
    try:
        saved_kinds = json.loads(noted.get(MODULES_NOTE, "{}"))
    except ValueError:
        saved_kinds = {}
    current_kinds = list_part_kinds(model)
    if not isinstance(saved_kinds, dict) or not saved_kinds:
        return
    other = [
        f"{name}: {saved_kinds[name]} in the checkpoint, {current_kinds[name]} in this model"
        for name in current_kinds
        if saved_kinds.get(name, current_kinds[name]) != current_kinds[name]
    ]
    if other:
        warn(
            f"{path} was saved by a model in which these submodules have different classes, so the loaded weights "
            "may give different results:\n  " + abbreviate(other, _SHOWN, "\n  ")
        )


def check_weights(
    model: nn.Module,
    weights: dict[str, Any],
    path: AnyPath | str,
    strict: bool = True,
    left_out: Collection[str] = (),
) -> dict[str, Any]:
    """Check that ``weights`` fit ``model``, and return those that do.

    ``weights`` contains tensors, which may be `Stored`, and the extra state of modules, by name. Names in
    ``left_out`` may be missing.

    Raises:
        ValueError: If the weights do not fit the model. Without ``strict``, this is a warning.
    """
    state = model.state_dict()
    reshaped, untied = find_reshaped(state, weights, model), _find_untied(model, weights)
    lines = _compare_names(state, weights, {name for name in state if strip_compile_prefix(name) in left_out})
    lines += reshaped.values()
    lines += [
        f"{name}: tied to {first_name} in the model, but has different values in the checkpoint"
        for name, first_name in untied.items()
    ]
    if not lines:
        return weights
    if strict:
        raise ValueError(f"{_describe_other_model(path, lines)}\n{TO_LOAD_WHAT_FITS}")
    warn(f"{_describe_other_model(path, lines)}\nWeights that do not fit are skipped.")
    return {name: value for name, value in weights.items() if name in state and name not in {**reshaped, **untied}}


def _describe_other_model(path: AnyPath | str, lines: list[str]) -> str:
    return f"{path} was saved by a different model:\n  " + abbreviate(lines, 30, "\n  ")


def compare_names(model: nn.Module, weights: Mapping[str, Any], path: AnyPath | str, complete: bool) -> None:
    """Check names and shapes alone, before any value is read; see `list_differences`.

    Raises:
        ValueError: If they differ from the model's.
    """
    if lines := list_differences(model, weights, complete):
        raise ValueError(f"{_describe_other_model(path, lines)}\n{TO_LOAD_WHAT_FITS}")


def list_differences(
    model: nn.Module, weights: Mapping[str, Any], complete: bool, left_out: Collection[str] = ()
) -> list[str]:
    """Return the differences between the names and shapes of ``weights`` and ``model``, as lines.

    Without ``complete``, or if the model has lazy parameters without a shape, names that are missing on one side are
    not reported. Names in ``left_out`` may be missing.
    """
    state = {strip_compile_prefix(name): value for name, value in model.state_dict().items()}
    names = [] if not complete or any(map(is_lazy, state.values())) else _compare_names(state, weights, left_out)
    return [*names, *find_reshaped(state, weights, model).values()]


def _compare_names(state: Mapping[str, Any], weights: Mapping[str, Any], left_out: Collection[str]) -> list[str]:
    missing = [f"missing: {name}" for name in sorted(set(state) - set(weights) - set(left_out))]
    return missing + [f"unexpected: {name}" for name in sorted(set(weights) - set(state))]


def find_reshaped(state: Mapping[str, Any], weights: Mapping[str, Any], model: nn.Module) -> dict[str, str]:
    """Return a line about each of ``weights`` whose shape differs from that in the model's ``state``, by name.

    Modules that may resize their tensors as they load are left out: torch then compares the shapes.
    """
    parts = model.named_modules()
    resizing = tuple(strip_compile_prefix(f"{name}." * bool(name)) for name, part in parts if _may_resize(part))
    return {
        name: f"{name}: {_describe_form(weights[name])} in the checkpoint, {_describe_form(state[name])} in the model"
        for name in state
        # The value that a module's own ``get_extra_state`` returns may differ each time.
        if name in weights
        and isinstance(state[name], Tensor)
        and not is_lazy(state[name])  # accepts any shape
        and not strip_compile_prefix(name).startswith(resizing)
        and _describe_form(state[name]) != _describe_form(weights[name])
    }


def _may_resize(module: nn.Module) -> bool:
    hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    functions = [module._load_from_state_dict, *(getattr(hook, "func", hook) for hook in hooks)]
    return not all(str(getattr(function, "__module__", "")).startswith("torch.") for function in functions)


def _describe_form(value: Any) -> str:
    return str(tuple(value.shape)) if hasattr(value, "shape") else name_type(value)


def _find_untied(model: nn.Module, weights: dict[str, Any]) -> dict[str, str]:
    """Return the names of tied tensors whose values in ``weights`` differ, each with the name that it is tied to."""
    first: dict[int, str] = {}
    separated = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        first_name = first.setdefault(id(tensor), name)
        first_value, value = weights.get(first_name), weights.get(name)
        if (
            first_value is not value
            and first_value is not None
            and value is not None
            and not torch.equal(first_value[...], value[...])
        ):
            separated[name] = first_name
    return separated


def warn_dtypes_changed(model: nn.Module, weights: Mapping[str, Any], path: AnyPath) -> None:
    """Warn if weights were saved in dtypes other than the model's: the run then does not resume exactly."""
    lines = [
        f"{name}: {str(weights[name].dtype)[6:]} in the checkpoint, {str(current.dtype)[6:]} in this model"
        for name, current in model.state_dict().items()
        if isinstance(current, Tensor) and getattr(weights.get(name), "dtype", current.dtype) != current.dtype
    ]
    if lines:
        text = abbreviate(lines, _SHOWN, "\n  ")
        warn(f"{path} was saved by a model with different dtypes, so the run does not resume exactly:\n  {text}")
