"""Sizes of a model's modules and tensors in bytes, and the smallest parts into which a model can be split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...common.messages import nearest, warn
from ...strategies.distributed import make_view_key
from .module_tensors import (
    READ_FROM_OUTSIDE,
    is_buffer,
    iter_direct_tensors,
    list_class_names,
    named_tensors,
    parse_dtype,
    resolve_stored_dtype,
)

Dtypes = Mapping[str, torch.dtype | str]


def compute_module_sizes(
    model: nn.Module,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Dtypes | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the size in bytes of every module and tensor, by name; ``""`` is the whole model.

    A tied tensor is counted once in the size of each module that contains it.

    Args:
        model: The model; it may be on the meta device.
        dtype: The dtype in which floating point tensors will be loaded. Default: their own.
        special_dtypes: Dtypes by tensor name, for tensors that will be loaded in a dtype other than ``dtype``.
        buffers_only: Measure only buffers. Parameters are then not listed.

    Raises:
        ValueError: If an argument is invalid.
    """
    tensors = named_tensors(model)
    bytes_of = measure_tensors(model, dtype, special_dtypes)
    inside: dict[str, set[Any]] = {path: set() for path, _ in model.named_modules(remove_duplicate=False)}
    sizes = dict.fromkeys(inside, 0)
    for name, tensor in tensors.items():
        if buffers_only and not is_buffer(tensor):
            continue
        key = make_view_key(tensor)
        sizes[name] = bytes_of[key]
        path = name
        while path:
            path = path.rpartition(".")[0]
            if key not in inside[path]:
                inside[path].add(key)
                sizes[path] += bytes_of[key]
    return sizes


def measure_tensors(
    model: nn.Module, dtype: torch.dtype | str | None = None, special_dtypes: Dtypes | None = None
) -> dict[Any, int]:
    """Return the size in bytes of each distinct tensor, keyed by `make_view_key`."""
    tensors, general = named_tensors(model), parse_dtype(dtype)
    special = {name: parse_dtype(kind, f"special_dtypes[{name!r}]") for name, kind in (special_dtypes or {}).items()}
    for name in special:
        if name not in tensors:
            raise ValueError(
                f"special_dtypes names {name!r}, but the model has no such tensor.{nearest(name, tensors)}"
            )
    byte_sizes: dict[Any, int] = {}
    for name, tensor in tensors.items():
        kind = special.get(name) or resolve_stored_dtype(tensor, general)
        size = tensor.numel() * kind.itemsize
        key = make_view_key(tensor)
        byte_sizes[key] = max(byte_sizes.get(key, 0), size) if name in special else byte_sizes.get(key, size)
    return byte_sizes


@dataclass(frozen=True)
class Part:
    """Modules and tensors that are placed on one device together, because they share a tensor or must not be split.

    Attributes:
        names: The names of the modules and tensors in the part.
        size: The size of the part in bytes, with tied tensors counted once.
        buffers: The size of the buffers in the part, in bytes.
        largest: The size in bytes of the parameters of the part's largest module.
    """

    names: list[str]
    size: int
    buffers: int
    largest: int


def split_model(
    model: nn.Module,
    no_split: list[str] | None = None,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Dtypes | None = None,
) -> list[Part]:
    """Split the model into the smallest permitted parts, in the order of its modules.

    ``no_split`` names classes whose modules are not split. The classes in `READ_FROM_OUTSIDE` are never split.
    """
    whole_classes = check_class_names(model, "no_split_module_classes", no_split)
    atoms: dict[str, dict[Any, bool]] = {}  # the distinct tensors of each module, and whether they are buffers

    def visit(path: str, module: nn.Module) -> None:
        children = list(module.named_children())
        if not children or isinstance(module, READ_FROM_OUTSIDE) or list_class_names(module) & whole_classes:
            atoms[path] = {make_view_key(tensor): is_buffer(tensor) for tensor in named_tensors(module).values()}
            return
        dot = f"{path}." if path else ""
        for name, tensor in iter_direct_tensors(module):
            atoms[dot + name] = {make_view_key(tensor): is_buffer(tensor)}
        for name, child in children:
            visit(dot + name, child)

    visit("", model)
    bytes_of = measure_tensors(model, dtype, special_dtypes)
    return [_build_part(names, atoms, bytes_of) for names in _group_by_shared_tensors(atoms)]


def _group_by_shared_tensors(atoms: dict[str, dict[Any, bool]]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    owner: dict[Any, str] = {}  # the first name in the group that a tensor belongs to
    for name, keys in atoms.items():
        firsts = list(dict.fromkeys(owner[key] for key in keys if key in owner))
        home = min(firsts, key=list(groups).index) if firsts else name
        members = groups.setdefault(home, [])
        for other in firsts:
            if other != home:
                members += groups.pop(other)
        members.append(name)
        for member in members if len(firsts) > 1 else [name]:
            owner |= dict.fromkeys(atoms[member], home)
    return list(groups.values())


def _build_part(names: list[str], atoms: dict[str, dict[Any, bool]], bytes_of: dict[Any, int]) -> Part:
    together = {key: buffer for name in names for key, buffer in atoms[name].items()}
    parameters = [sum(bytes_of[key] for key, buffer in atoms[name].items() if not buffer) for name in names]
    buffers = sum(bytes_of[key] for key, buffer in together.items() if buffer)
    return Part(names, sum(bytes_of[key] for key in together), buffers, max(parameters))


def check_class_names(model: nn.Module, argument: str, names: list[str] | str | None) -> set[str]:
    """Return class names as a set; warn if no module of the model has one of these classes.

    The name of a base class also matches its subclasses.
    """
    requested = {names} if isinstance(names, str) else set(names or ())
    model_classes = set().union(*(list_class_names(module) for module in model.modules()))
    if requested and not requested & model_classes:
        name = min(requested)
        warn(
            f"{argument}={sorted(requested)} has no effect, because the model has no module of "
            f"{'this class' if len(requested) == 1 else 'these classes'}.{nearest(name, model_classes)}"
        )
    return requested
