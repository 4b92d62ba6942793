"""Loading of checkpoints, and construction of tasks and data modules from them."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

from ...common.messages import abbreviate, name_type, nearest, warn
from ...common.optional import is_installed
from ...engine.checkpoint import (
    ADDED,
    DATAMODULE_HPARAMS,
    HPARAMS,
    STATE,
    OpenCheckpoint,
    Record,
    decode,
    extra_part,
    filesystem,
    load_into_memory,
    model_part,
    open_added,
    open_registered,
    read_tensor,
)
from ...engine.weights import Opened, Source, TorchFile, View, check_extent, load, open_source
from ..copies import copy_state
from .cli_hparams import CLASS_PATH, INSTANTIATOR, instantiate_module
from .hooked_weights import HookDict, HookedWeights
from .hparams import CannotRebuild, readable, rebuild
from .signatures import Argument, signature

# Tasks and data modules, by the name of the stage that they take part in and the part of a checkpoint with their
# hyperparameters. A checkpoint holds only data. While what it was made of exists, a load in the same process gets
# copies of the objects that it lacks.
_LIVING: WeakValueDictionary[tuple[str, str], Any] = WeakValueDictionary()

_OLD_NAMES = ("hparams", "module_arguments")  # names of `hyper_parameters` in Lightning before 0.8
_MAX_HPARAMS_BYTES = 2**20  # a YAML file of this size takes seconds


def warn_of_code(weights_only: bool | None) -> None:
    """Warn about ``weights_only=False``, which has no effect, because code in a checkpoint never runs.

    Args:
        weights_only: Value that the user passed.
    """
    if weights_only is not None and not weights_only:
        warn(
            "weights_only=False has no effect: only plain data is read from a checkpoint, and code in it is never run. "
            "Remove the argument."
        )


def _resolve_device(map_location: Any) -> torch.device | None:
    """Return the device that ``map_location`` selects; None if it selects none, so the weights stay on the CPU."""
    device = map_location
    try:
        if callable(device):
            storage = device(torch.UntypedStorage(0), "cpu")
            device = None if storage is None else storage.device
        elif isinstance(device, Mapping) and len({str(target) for target in device.values()}) == 1:
            device = next(iter(device.values()))
        if device is None:
            return None
        if isinstance(device, str | int | torch.device):
            return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # an unknown name, or torch without this kind of device
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(
            f"map_location={map_location!r:.100} is not a device that torch can use: {reason}. Remove it to load the "
            "weights onto the CPU."
        ) from None
    raise TypeError(
        f"map_location={map_location!r:.100} must be a device, a function that moves a storage, or a dict whose values "
        "are all the same device. Remove it to load the weights onto the CPU."
    )


# The classes of tasks and data modules import this file, so it has `Any` for them: no types in a circle.
def build(
    cls: type[Any],
    source: Source,
    map_location: Any,
    hparams_file: str | Path | None,
    strict: bool | None,
    sha256: str | None,
    overrides: dict[str, Any],
) -> Any:
    """Build a task and load its weights; see `TaskModule.load_from_checkpoint`.

    ``overrides`` are constructor arguments that override the saved ones.
    """
    device = _resolve_device(map_location)
    file_hparams = None if hparams_file is None else read_hparams_file(hparams_file)
    with open_source(source, sha256) as opened_source:
        document, entries = _read_task(opened_source)
        if file_hparams is not None:
            document = _replace_hparams(file_hparams, document)
            entries["hyper_parameters"] = file_hparams
        task = _construct(cls, opened_source.place, document, overrides)
        task.configure_model()
        replace_lost(entries, opened_source.place, None if document.get("left_out") else task)
        if (saved := opened_source.checkpoint) is not None:
            opened_source = _edit_weights(task, opened_source, saved, entries)
        elif opened_source.file is not None:
            task.on_load_checkpoint(entries)
            opened_source = Opened(opened_source.place, dict(entries["state_dict"]))  # as the hook left them
        load.load_opened(task, opened_source, task.strict_loading if strict is None else strict)
    return task if device is None else task.to(device)


def build_datamodule(
    cls: type[Any], source: Source, hparams_file: str | Path | None, sha256: str | None, overrides: dict[str, Any]
) -> Any:
    """Build a data module and restore its state; see `DataModule.load_from_checkpoint`.

    ``overrides`` are constructor arguments that override the saved ones.
    """
    file_hparams = None if hparams_file is None else read_hparams_file(hparams_file)
    document: dict[str, Any] = {}
    state: Any = None
    with open_source(source, sha256) as opened_source:
        if (saved := opened_source.checkpoint) is not None:
            document = _read_hparams(saved, DATAMODULE_HPARAMS)
            state = load_into_memory(open_registered(saved).get("datamodule"), {}, {})
        elif opened_source.file is not None:
            parts, _ = _read_parts(opened_source.file)
            document = {"hyper_parameters": parts.get("datamodule_hyper_parameters")}
            document["hparams_name"] = parts.get("datamodule_hparams_name")
            state = parts.get(cls.__qualname__)
        else:
            raise ValueError(
                f"{opened_source.place} contains only weights, not a data module. Pass a checkpoint from a run with a "
                "data module."
            )
        if file_hparams is not None:
            document = _replace_hparams(file_hparams, document)
        module = _construct(cls, opened_source.place, document, overrides)
        if state is not None:
            module.load_state_dict(state)
    return module


def load_checkpoint(
    checkpoint_path: Source, map_location: Any = None, weights_only: bool | None = None, *, sha256: str | None = None
) -> dict[str, Any]:
    """Load a checkpoint, and return its content as a dict with Lightning's keys.

    Call this function instead of ``torch.load(path)``.

    Args:
        checkpoint_path: A Treadle checkpoint, or another source of weights that `load_weights` accepts.
        map_location: Device of the weights, or a dict or function that selects one device, as in ``torch.load``.
            Default: the CPU.
        weights_only: Ignored; code stored in a checkpoint is never executed.
        sha256: Expected SHA-256 digest of the file. Without it, a download only warns with its digest.

    Returns:
        Dict with the weights by name under ``state_dict``, and other entries of the checkpoint, such as ``epoch``.

    Raises:
        TypeError, ValueError: If an argument is invalid, or the checkpoint cannot be loaded.
        OSError: If a download fails.

    Examples:
        >>> import tempfile
        >>> import treadle as tl
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> trainer = tl.Trainer(max_steps=1, accelerator="cpu", devices=1, barebones=True)
        >>> trainer.fit(BoringModel())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     trainer.save_checkpoint(f"{folder}/last.ckpt")
        ...     checkpoint = tl.load_checkpoint(f"{folder}/last.ckpt")
        >>> sorted(checkpoint["state_dict"])
        ['layer.bias', 'layer.weight']
    """
    warn_of_code(weights_only)
    device = _resolve_device(map_location)
    with open_source(checkpoint_path, sha256) as opened_source:
        document, entries = _read_task(opened_source)
        replace_lost(entries, opened_source.place, None)
        if opened_source.checkpoint is not None and document.get("hparams_name"):
            entries["hparams_name"] = document["hparams_name"]
        weights: dict[str, Any] = {}
        for name, piece in opened_source.weights.items():
            values = torch.empty(piece.shape, dtype=piece.dtype, device="cpu")
            piece.fill(values)
            weights[name] = values if device is None else values.to(device)
    return {**entries, "state_dict": weights | opened_source.extras}


def _read_task(source: Opened) -> tuple[dict[str, Any], HookDict]:
    """Return a task's hyperparameters, with what is known about them, and the dict that checkpoint hooks receive."""
    if (saved := source.checkpoint) is not None:
        document, hooked = _read_hparams(saved, HPARAMS), read_hook_entries(saved)
        _take_changed_hparams(document, hooked)
        return document, hooked
    entries = {} if source.file is None else _read_document(source, source.file)
    info = _read_info(entries)
    document = {**entries, "left_out": read_left_out(info, HPARAMS), "find": partial(copy_objects, info, HPARAMS)}
    return document, add_objects(entries, info)


def _construct(cls: type[Any], place: str, document: dict[str, Any], overrides: dict[str, Any]) -> Any:
    """Build a task or data module from its saved hyperparameters and the caller's overrides."""
    settings = document.get("hyper_parameters")
    if isinstance(settings, Mapping) and INSTANTIATOR in settings and is_installed("jsonargparse"):
        return instantiate_module(cls, {**settings, **overrides})
    if cls.__init__ is object.__init__:  # its signature accepts anything
        return cls(**overrides)
    return cls(**_merge_arguments(cls, place, document, overrides))


def read_hyperparameters(source: Source) -> dict[str, Any]:
    """Return the hyperparameters of the task in a checkpoint as plain data; an empty dict if there are none."""
    with open_source(source) as opened_source:
        saved, document = opened_source.checkpoint, {}
        if saved is not None:
            document = _read_hparams(saved, HPARAMS)
            _take_changed_hparams(document, read_hook_entries(saved))
        elif opened_source.file is not None:
            document = _read_parts(opened_source.file)[0]
    values = document.get("hyper_parameters") or {}
    is_enum = {name: isinstance(value, Record) and value.kind == "enum" for name, value in values.items()}
    return {name: value.content if is_enum[name] else readable(value) for name, value in values.items()}


def _edit_weights(task: Any, source: Opened, saved: OpenCheckpoint, checkpoint: dict[str, Any]) -> Opened:
    weights = HookedWeights(read_weights(saved))
    checkpoint["state_dict"] = weights.offered
    task.on_load_checkpoint(checkpoint)
    edited = weights.get_edited(checkpoint)
    return source if edited is None else Opened(source.place, edited, frozen=source.frozen)


def read_weights(opened: OpenCheckpoint) -> dict[str, Any]:
    """Return the first model's state in a checkpoint, by name: its weights and any extra state."""
    extra = extra_part(0)
    weights = {name: read_tensor(piece) for name, piece in opened.open_part(model_part(0)).items()}
    return weights | (opened.read_part(extra) if opened.has(extra) else {})


def read_hook_entries(opened: OpenCheckpoint) -> HookDict:
    """Return the entries that hooks added to a checkpoint, its counters, and the data module's hyperparameters."""
    manifest = opened.manifest
    counters = {"epoch": manifest.epoch, "global_step": manifest.step}
    added = load_into_memory(open_added(opened), {}, {})
    return add_objects({**read_datamodule_hparams(opened), **added, **counters}, manifest.info)


def read_datamodule_hparams(opened: OpenCheckpoint) -> dict[str, Any]:
    """Return the data module's hyperparameters as plain data, under Lightning's keys; an empty dict if it has none."""
    document = _read_hparams(opened, DATAMODULE_HPARAMS)
    if not document:
        return {}
    values = {name: readable(value) for name, value in (document.get("hyper_parameters") or {}).items()}
    return {"datamodule_hparams_name": document.get("hparams_name"), "datamodule_hyper_parameters": values}


def remember(owner: Any, part: str, origin: str) -> None:
    """Remember a task or data module for `copy_objects`, as long as it exists.

    Args:
        owner: The task or data module.
        part: Name of the part of a checkpoint that contains its hyperparameters.
        origin: Name of the stage that it takes part in, the same on all processes.
    """
    _LIVING[origin, part] = owner


def copy_objects(info: Any, part: str, lost: dict[str, str], added: bool = False) -> dict[str, Any]:
    """Return copies of objects that a checkpoint lacks, and remove their names from ``lost``.

    Args:
        info: The manifest's entries, of which ``origin`` names the stage that saved the checkpoint.
        part: See `remember`.
        lost: For each missing object, by name, the reason why it was not stored.
        added: Whether ``on_save_checkpoint`` hooks added the objects; otherwise, they are hyperparameters.
    """
    owner = _LIVING.get((str(info.get("origin")), part))
    objects = {} if owner is None else vars(owner).get("_added_objects", {}) if added else owner.hparams
    found = {name: objects[name] for name in lost if name in objects}
    try:
        found = copy_state(found)
    except Exception as error:  # whatever the __deepcopy__ of a user's class raises
        lost |= {name: f"{lost[name]}, which cannot be copied: {error}" for name in found}
        return {}
    for name in found:
        del lost[name]
    return found


def read_left_out(info: Mapping[str, Any], part: str) -> dict[str, str]:
    """Return what a checkpoint lacks of a part: the reasons by name."""
    parts = info.get("left_out")
    left_out = parts.get(part) if isinstance(parts, dict) else None
    return {str(name): str(words) for name, words in left_out.items()} if isinstance(left_out, dict) else {}


def add_objects(entries: dict[str, Any], info: Mapping[str, Any]) -> HookDict:
    """Return the entries of a checkpoint with the objects that ``on_save_checkpoint`` hooks added to them.

    They are copied from the task that was saved, if this process has it; see `replace_lost` for the others.

    Args:
        entries: The entries that are stored.
        info: The manifest's entries.
    """
    lost = read_left_out(info, ADDED)
    offered = HookDict(entries | copy_objects(info, HPARAMS, lost, added=True))
    offered.lost = lost
    return offered


def replace_lost(entries: HookDict, place: Any, task: Any) -> None:
    """Replace the objects that a checkpoint could not store by those of a task, and warn.

    Args:
        entries: Result of `add_objects`.
        place: Path of the checkpoint.
        task: The task that has been built as the saved one, whose ``on_save_checkpoint`` is called; None if there is
            no such task.
    """
    if lost := entries.lost:
        if task is not None:
            current = HookDict({**entries, "state_dict": task.state_dict(), "hyper_parameters": {**task.hparams}})
            task.on_save_checkpoint(current)
            entries |= {name: current[name] for name in lost if name in current}
        fix = "This task's are used." if entries.keys() >= lost.keys() else "Create such objects in on_load_checkpoint."
        warn(
            f"{place} does not contain {_join_words(lost)}, which on_save_checkpoint added, because a checkpoint "
            f"stores only data. {fix}"
        )


def _take_changed_hparams(document: dict[str, Any], hook_entries: dict[str, Any]) -> None:
    """Apply the changes that ``on_save_checkpoint`` made to hyperparameters, in ``document`` and ``hook_entries``."""
    values = document.get("hyper_parameters")
    if isinstance(values, dict):
        changed = hook_entries.get("hyper_parameters") or {}
        document["hyper_parameters"] = hook_entries["hyper_parameters"] = values | changed
        document["left_out"] = {k: v for k, v in (document.get("left_out") or {}).items() if k not in changed}


def _read_hparams(saved: OpenCheckpoint, part: str) -> dict[str, Any]:
    """Return the hyperparameters in a part of a checkpoint; an empty dict if the checkpoint lacks this part."""
    document = saved.read_part(part) if saved.has(part) else {}
    if not isinstance(document, dict):
        raise ValueError(
            f"{saved.path}: part {part!r} is damaged: it is {name_type(document)}, but must be a dict. "
            f"{filesystem.RESTORE}"
        )
    return {**document, "find": partial(copy_objects, saved.manifest.info, part)} if document else {}


def _read_document(opened_source: Opened, file: TorchFile) -> dict[str, Any]:
    """Return a torch file's content as the dict that Lightning passes to ``on_load_checkpoint``.

    Large tensors may be memory-mapped.
    """
    try:
        parts, dropped = _read_parts(file)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).rstrip(".")
        raise ValueError(f"{opened_source.place} cannot be read: {reason}.") from error
    arguments = {place: name for place, name in dropped.items() if place.startswith(("hyper_parameters.", "hparams."))}
    if arguments:
        dropped_text = ", ".join(f"{place} ({name})"[:150] for place, name in list(arguments.items())[:8])
        warn(
            f"{opened_source.place}: hyperparameters that are not plain data are ignored: {dropped_text}. Code in a "
            "checkpoint is never run. If the task needs them, pass them to load_from_checkpoint."
        )
    return parts | {
        "state_dict": {name: read_tensor(piece) for name, piece in opened_source.weights.items()} | opened_source.extras
    }


def _read_info(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest's entries from a dict that a `CheckpointIO` plugin wrote; an empty dict for another file."""
    exact = document.get("treadle")
    text = exact.get("info") if isinstance(exact, dict) else None
    info = json.loads(text) if isinstance(text, bytes) else None
    return info if isinstance(info, dict) else {}


def _read_parts(file: TorchFile) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the file's entries except for ``state_dict``, and the type names of the values dropped from them.

    The reader drops values that are not plain data. Their type names are given by place, such as
    ``"hyper_parameters.model"``.
    """
    raw = file.reader.container(file.document)
    parts: dict[str, Any] = {}
    dropped: dict[str, str] = {}
    for key, value in raw.items():
        if not isinstance(key, str) or key in ("state_dict", "hparams_type"):
            continue
        if isinstance(file.reader.container(value), dict):
            dropped_earlier = set(file.reader.dropped)
            inside = {key: file.reader.mapping(value, key)}
            dropped |= {place: name for place, name in file.reader.dropped.items() if place not in dropped_earlier}
        else:
            inside = file.reader.mapping({key: value}, "")
        check_extent(inside)
        parts |= _read_tensors(file, inside)
    exact = parts.get("treadle")
    if isinstance(exact, dict) and isinstance(files := exact.get("files"), dict):
        try:
            parts |= _read_exact_hparams(files)
        except (AttributeError, TypeError) as error:
            raise ValueError(f"its entry 'treadle' is damaged: {error}") from error
    return parts, dropped


def _read_exact_hparams(files: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters in the files that a `CheckpointIO` plugin wrote, with the changes that hooks made.

    The other entries of the plugin's dict contain them as plain data, without classes and the types of enums and dates.

    Args:
        files: For each file, its content, or a dict with the tensors in it.
    """

    def read(part: str) -> Any:
        content = files.get(f"{part}.json")
        return json.loads(content) if isinstance(content, bytes) else {}

    def restore(document: Any, part: str) -> dict[str, Any]:
        restored = decode(document, (files.get(f"{part}.safetensors") or {}).get("tensors", {}))
        return restored if isinstance(restored, dict) else {}

    in_state = read(STATE).get("registered", {}).get("callbacks", {}).get("added", {})
    added, part = (read(ADDED), ADDED) if f"{ADDED}.json" in files else (in_state, STATE)
    document = restore(read(HPARAMS), HPARAMS)
    _take_changed_hparams(document, {"hyper_parameters": restore(added.get("hyper_parameters", {}), part)})
    module = restore(read(DATAMODULE_HPARAMS), DATAMODULE_HPARAMS)
    return {**document, **{f"datamodule_{name}": value for name, value in module.items()}}


def _read_tensors(file: TorchFile, value: Any) -> Any:
    if isinstance(value, View):
        return read_tensor(file.piece(value))
    if isinstance(value, dict):
        return {key: _read_tensors(file, item) for key, item in value.items()}
    return type(value)(_read_tensors(file, item) for item in value) if type(value) in (list, tuple) else value


def _replace_hparams(values: dict[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    whole = {name: saved.get(name) for name in ("hparams_name", "hparams_kind")}
    return {**whole, "hyper_parameters": values, "left_out": {}, "from_text": True}


def _merge_arguments(cls: type[Any], place: str, document: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``__init__``: the saved ones that it accepts, and the caller's overrides.

    In ``document``, those that have been found or passed are removed from ``left_out``.
    """
    saved: dict[str, Any] = {}
    for name in (*_OLD_NAMES, "hyper_parameters"):
        section = document.get(name)
        saved |= vars(section) if hasattr(section, "__dict__") else section or {}
    saved = {name: value for name, value in saved.items() if name not in (INSTANTIATOR, CLASS_PATH)}
    parameters = inspect.signature(cls.__init__).parameters
    names = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)][1:]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    lost = {name: words for name, words in (document.get("left_out") or {}).items() if name not in overrides}
    document["left_out"] = lost
    find: Callable[[dict[str, str]], dict[str, Any]] = document.get("find") or (lambda lost: {})
    whole = document.get("hparams_name")
    if isinstance(whole, str) and whole in names:  # save_hyperparameters(hparams): one argument that holds all
        kind, name = document.get("hparams_kind") or ("mapping", "")
        inside = {} if takes_all else {name: value for name, value in overrides.items() if name not in names}
        overrides = {name: value for name, value in overrides.items() if name not in inside}
        found = {} if whole in overrides else find(lost)
        saved = {whole: Record(kind, name, {**saved, **found, **inside})} if whole not in overrides else {}
        if lost and whole not in overrides:
            warn(f"{place}: {whole} lacks {_join_words(lost)}, which cannot be stored. {_advise_passing(lost)}")
        lost = {}
    elif not takes_all:
        if unknown := [str(name) for name in saved if name not in names and name not in overrides]:
            several = "s" * (len(unknown) > 1)
            warn(
                f"{place}: the saved hyperparameter{several} {abbreviate(unknown)} "
                f"{'are' if several else 'is'} ignored, because {cls.__name__} has no such argument{several}."
            )
        if ignored := [name for name in overrides if name not in names]:
            hints = "".join(nearest(name, names) for name in ignored)
            warn(f"{', '.join(ignored)}: ignored, because {cls.__name__} has no such argument.{hints}")
            overrides = {name: value for name, value in overrides.items() if name in names}
        saved = {name: value for name, value in saved.items() if name in names}
        lost = document["left_out"] = {name: words for name, words in lost.items() if name in names}
    saved, not_rebuilt = _rebuild_arguments(
        cls, {name: value for name, value in saved.items() if name not in {*lost, *overrides}}, document
    )
    lost |= not_rebuilt
    saved |= find(lost)
    _check_missing(cls, place, {*saved, *overrides}, lost)
    return {**saved, **overrides}


def _rebuild_arguments(
    cls: type[Any], saved: Mapping[str, Any], document: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    arguments = signature(cls).arguments
    rebuilt: dict[str, Any] = {}
    lost: dict[str, str] = {}
    for name, value in saved.items():
        argument = arguments.get(name) or Argument(name)
        try:
            from_text = bool(document.get("from_text"))
            rebuilt[name] = rebuild(value, argument.type, argument.default, cls.__module__, from_text)
        except CannotRebuild as error:
            lost[name] = f"{name} ({error})"
    return rebuilt, lost


def _check_missing(cls: type[Any], place: str, available: set[str], lost: Mapping[str, str]) -> None:
    """Raise a TypeError for a missing required argument; warn if a default replaces a value that was not stored."""
    missing = [
        name
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name not in available
    ]
    if missing:
        words = {name: lost.get(name, name) for name in missing}
        raise TypeError(
            f"{place} does not contain {_join_words(words)}, which {cls.__name__} needs. {_advise_passing(words)}"
        )
    if lost:
        defaults = "its default" if len(lost) == 1 else "their defaults"
        warn(f"{place} does not contain {_join_words(lost)}; {cls.__name__} uses {defaults}. {_advise_passing(lost)}")


def _join_words(words: Mapping[str, str]) -> str:
    return ", ".join(words.values())


def _advise_passing(names: Iterable[str]) -> str:
    return f"Pass {', '.join(f'{name}=...' for name in names)} to load_from_checkpoint."


def read_hparams_file(path: str | Path) -> dict[str, Any]:
    """Read hyperparameters from the ``hparams.yaml`` that loggers write. Only data is read."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"hparams_file={path!r:.100} must be the path of a .yaml or .yml file.")
    path = Path(path)
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise ValueError(f"hparams_file={str(path)!r} must be a .yaml or .yml file.")
    if not path.is_file():
        raise FileNotFoundError(f"hparams_file={str(path)!r} {'is not a file' if path.exists() else 'does not exist'}.")
    if (size := os.path.getsize(path)) > _MAX_HPARAMS_BYTES:
        raise ValueError(f"hparams_file={str(path)!r} has {size:,} bytes, but may have at most {_MAX_HPARAMS_BYTES:,}.")
    try:
        hparams = _parse_yaml(path.read_text(encoding="utf-8"))
        check_extent(hparams)
    except (ValueError, RecursionError, TypeError, LookupError, OverflowError) as error:
        raise ValueError(f"hparams_file={str(path)!r} cannot be read as plain data: {error}") from error
    if not isinstance(hparams, dict) or not all(isinstance(name, str) for name in hparams):
        kind = "a name that is not a string" if isinstance(hparams, dict) else f"{name_type(hparams)}"
        kind = "nothing" if hparams is None else kind
        raise ValueError(f"hparams_file={str(path)!r} must contain a mapping of names to values, but contains {kind}.")
    return hparams


def _parse_yaml(text: str) -> Any:
    """Return the content of a YAML file, read by a loader that builds only data."""
    import yaml

    class Loader(yaml.SafeLoader):
        def flatten_mapping(self, node: Any) -> None:  # a few nested merges turn ten lines into a billion entries
            if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
                raise ValueError("it merges mappings ('<<'), which loggers never write")

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
