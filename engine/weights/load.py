"""Loading of weights from Treadle and other programs into a model, without running code that a file contains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ...common.messages import abbreviate, name_type, warn
from ...strategies import SingleDevice, World
from ...strategies.distributed import cut_like, strip_compile_prefix
from ..checkpoint import check_frozen, compute_digests, find_reshaped, read_tensor
from .sources import Opened, Source, open_source

Rename = Callable[[str], str | None]

_WRAPPERS = ("module.", "_forward_module.")  # DistributedDataParallel and Fabric put these before every name
_INSIDE = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")  # FSDP1 puts these at any place


@dataclass(frozen=True)
class _LeftOut:
    """Weight that a Treadle checkpoint omits, because it was not trained."""

    digest: str


@dataclass(frozen=True)
class Loaded:
    """Result of `load_weights`. All names are those after ``prefix`` and ``rename`` were applied.

    Attributes:
        names: Names of the weights that were loaded.
        missing: Names of weights that only the model has.
        unexpected: Names of weights that only the source has.
        reshaped: Names of weights that have a different shape in the source.
    """

    names: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()


def load_weights(
    model: nn.Module,
    source: Source,
    *,
    strict: bool = True,
    prefix: str | None = None,
    rename: Rename | None = None,
    sha256: str | None = None,
) -> Loaded:
    """Load weights from any supported source into a model, by name. Code stored in the source is never executed.

    Args:
        model: The model, prepared or not. If it is sharded, each process loads its own shards.
        source: The path or URL of a Treadle checkpoint, a safetensors file, a file saved with ``torch.save`` (such as
            Lightning's ``.ckpt``), an index of several such files (``.index.json``), a folder in Hugging Face's format,
            or any other folder with a single index or weights file. A file saved with ``torch.save`` must contain a
            state dict at the top level or under ``"state_dict"``, ``"model_state_dict"`` or ``"model"``. An ``http``,
            ``https`` or ``file`` URL must name a single file. If an index is in an object store, such as S3, pass the
            URL of its folder. A binary file object is read to its end.
        strict: Require that the weights of the source and the model have the same names and shapes. For a tied
            parameter, one of its names is sufficient. If False, the weights that fit are loaded, and a warning
            describes the differences. Default: True.
        prefix: Load only weights whose names begin with this prefix, and remove it from the names. Default: None, which
            removes the prefixes of common wrappers, such as DDP, if the model's names do not have them.
        rename: A function that maps a name in the source, without ``prefix``, to the name in the model, or to None to
            skip the weight. Default: None, which keeps the names.
        sha256: The SHA-256 digest of the file, which is verified before the content is parsed. The digest of an index
            does not cover the files that the index names. Without it, a download only warns with its digest.

    Returns:
        The names of the weights that were loaded, and of the weights that were not.

    Raises:
        ValueError: If the source, its digest or another argument is invalid, or if the weights do not fit the model.
            The model remains unchanged, unless it has a custom ``load_state_dict``, ``_load_from_state_dict`` or
            ``set_extra_state``, or hooks that change names or shapes.
        TypeError: If an argument has the wrong type.
        ModuleNotFoundError: If the package for the scheme of the URL is not installed.
        OSError: If the source cannot be downloaded.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model={model!r:.100} must be a torch.nn.Module, not {name_type(model)}. Pass the model first, and then "
            "the source."
        )
    with open_source(source, sha256) as opened_source:
        return load_opened(model, opened_source, strict, prefix, rename)


def load_opened(
    model: nn.Module, source: Opened, strict: bool = True, prefix: str | None = None, rename: Rename | None = None
) -> Loaded:
    """Load the weights of an opened source into a model; see `load_weights`."""
    from ..big_models import share_tied_values  # takes 25 ms

    unwrapped = _unwrap_model(model)
    state = unwrapped.state_dict()
    targets = {strip_compile_prefix(name): name for name in state}
    weights = _rename_weights(source, prefix, rename, set(targets))
    frozen = {name: value.digest for name, value in weights.items() if isinstance(value, _LeftOut)}
    weights = {name: value for name, value in weights.items() if name not in frozen}
    parameters = unwrapped.named_parameters(remove_duplicate=False)
    tied = share_tied_values({strip_compile_prefix(name): p for name, p in parameters}, weights)
    weights |= {name: value for name, value in tied.items() if name not in weights}
    missing = tuple(name for name in targets if name not in weights and name not in frozen)
    unexpected = tuple(name for name in weights if name not in targets)
    reshaped = find_reshaped({name: state[key] for name, key in targets.items()}, weights, unwrapped)
    if strict:
        lines = [f"missing: {name}" for name in missing] + [f"unexpected: {name}" for name in unexpected]
        if (lines or reshaped) and not _may_change(unwrapped, bool(reshaped)):
            raise ValueError(
                f"{source.place} contains the weights of a different model:\n  "
                + abbreviate([line[:300] for line in (*lines, *reshaped.values())], 30, "\n  ")
                + f"\nTo load what fits, pass strict=False.{_suggest_prefix(weights, targets)}"
            )
        fitting = list(weights)
    else:
        fitting = [name for name in weights if name in targets and name not in reshaped]
        if not fitting:
            advice = _suggest_prefix(weights, targets) or " Map the names with rename=, or pass weights of this model."
            raise ValueError(f"{source.place}: none of its weights fit the model.{advice}")
        _warn_left_out(source.place, missing, unexpected, tuple(reshaped))
    if frozen:
        check_frozen(compute_digests(unwrapped, frozen, World()), frozen, source.place, strict)
    values = {}
    for name in fitting:
        value = read_tensor(weights[name]) if hasattr(weights[name], "fill") else weights[name]
        key = targets.get(name, name)
        # A hook may have inserted the sharded model's own parameters, which are already shards.
        cuts = isinstance(value, Tensor) and not hasattr(value, "device_mesh") and key in state
        values[key] = cut_like(value, state[key]) if cuts else value
    try:
        unwrapped.load_state_dict(values, strict=strict and not frozen)
    except RuntimeError as error:
        raise ValueError(
            f"{source.place} does not fit the model: {error}{_suggest_prefix(weights, targets)}"
        ) from error
    return Loaded(tuple(fitting), missing, unexpected, tuple(reshaped))


def _unwrap_model(model: nn.Module) -> nn.Module:
    unwrapped = SingleDevice().unwrap(model)
    empty = [name for name, value in unwrapped.state_dict().items() if getattr(value, "is_meta", False)]
    from ..big_models import is_dispatched  # takes 25 ms

    if is_dispatched(unwrapped):
        raise ValueError(
            "load_weights: the model is already dispatched, so its weights can't be replaced. Call "
            "remove_hook_from_submodules(model) first."
        )
    if empty:
        raise ValueError(
            f"load_weights: the model has tensors on the meta device, so they have no memory: {abbreviate(empty)}. "
            "Call model.to_empty(device=...) first, or use load_checkpoint_and_dispatch."
        )
    return unwrapped


def _may_change(module: nn.Module, reshaped: bool) -> bool:
    """Return whether a model may rename weights or replace layers as it loads; torch then compares names and shapes."""
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        return True
    hooks = [hook for part in module.modules() for hook in part._load_state_dict_pre_hooks.values()]
    functions = (getattr(hook, "hook", hook) for hook in hooks)
    renames = any(not str(getattr(hook, "__module__", "")).startswith("torch.distributed") for hook in functions)
    return renames and not reshaped


def _warn_left_out(place: str, *left: tuple[str, ...]) -> None:
    words = ("Missing in the source, so not changed in the model", "Not in the model", "Of a different shape")
    reasons = [f"{word}: {abbreviate(list(names))}" for word, names in zip(words, left, strict=True) if names]
    if reasons:
        warn(f"load_weights({place!r}, strict=False) did not load all weights. {'. '.join(reasons)}.")


def _rename_weights(source: Opened, prefix: str | None, rename: Rename | None, model_names: set[str]) -> dict[str, Any]:
    values = source.weights | {name: value for name, value in source.extras.items() if name.endswith("_extra_state")}
    values |= {name: _LeftOut(digest) for name, digest in source.frozen.items()}
    if prefix is None:
        values = _strip_wrappers(values, model_names)
    elif not any(name.startswith(prefix) for name in values):
        raise ValueError(
            f"{source.place}: no name begins with prefix={prefix!r}. The names are {abbreviate(list(values))}. Correct "
            "prefix=..., or remove it."
        )
    else:
        values = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    if rename is None:
        return values
    if not callable(rename):
        raise TypeError(
            f"rename={rename!r:.100} must be a function of a name, not {name_type(rename)}. Pass, for example, lambda "
            "name: name.replace('net.', 'body.', 1)."
        )
    result: dict[str, Any] = {}
    for name, value in values.items():
        new = rename(name)
        if new is None:
            continue
        if not isinstance(new, str):
            raise TypeError(f"rename maps {name!r:.100} to {new!r:.100}, but must map names to strings or None.")
        if new in result:
            raise ValueError(
                f"{source.place}: rename maps two weights to the name {new!r:.100}. Give each weight a distinct name."
            )
        result[new] = value
    return result


def _strip_wrappers(values: dict[str, Any], model_names: set[str]) -> dict[str, Any]:
    values = {strip_compile_prefix(name): value for name, value in values.items()}
    for inside in _INSIDE:
        if any(inside in name for name in values) and not any(inside in name for name in model_names):
            values = {name.replace(inside, ""): value for name, value in values.items()}
    while values:
        for wrapper in _WRAPPERS:
            if all(name.startswith(wrapper) for name in values) and not any(n.startswith(wrapper) for n in model_names):
                values = {name.removeprefix(wrapper): value for name, value in values.items()}
                break
        else:
            break
    return values


def _suggest_prefix(weights: Mapping[str, Any], model_names: Mapping[str, Any]) -> str:
    """Return a hint with a prefix whose removal or addition makes more names fit; "" if no such prefix is found."""
    if len(weights) > 100_000:
        return ""

    def list_beginnings(names: Mapping[str, Any]) -> set[str]:
        parts = [name.split(".")[:-1][:6] for name in list(names)[:100]]
        return {".".join(words[:n]) + "." for words in parts for n in range(1, len(words) + 1)}

    best, advice = sum(name in model_names for name in weights), ""
    for begin in sorted(list_beginnings(weights)):
        count = sum(name.startswith(begin) and name.removeprefix(begin) in model_names for name in weights)
        if count > best:
            best, advice = count, f" prefix={begin!r} makes {count} of the model's {len(model_names)} names fit."
    for begin in sorted(list_beginnings(model_names)):
        count = sum(begin + name in model_names for name in weights)
        if count > best:
            best = count
            advice = f" rename=lambda name: {begin!r} + name makes {count} of the model's {len(model_names)} names fit."
    return advice
