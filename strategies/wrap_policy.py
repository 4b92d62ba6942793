"""Policies that select submodules, each of which is sharded, recomputed or compiled as one unit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from torch import nn

from ..common.messages import name_type, nearest

# One or several names or classes, a number of parameters, or a function of a module.
Policy = str | type[nn.Module] | Collection[type[nn.Module] | str] | int | Callable[..., bool]
_LISTS = (nn.ModuleList, nn.ModuleDict)
_NAMES = ("auto", "parts")
_RULE = "must be 'auto', 'parts', module classes, a number of parameters or a function of a module"


def chosen_blocks(model: nn.Module, policy: Policy, flag: str) -> list[nn.Module]:
    """Return the submodules of ``model``, without ``model`` itself, that a policy selects. Inner modules come first.

    Args:
        model: The user's module.
        policy: ``"auto"`` (the repeated blocks), ``"parts"`` (also the other direct parts), classes or their names, a
            minimum number of parameters (not counting those of selected inner modules), ``f(module) -> bool``, or a
            policy of ``torch.distributed.fsdp.wrap``.
        flag: The argument's name, for errors.
    """
    if isinstance(policy, str) and policy in _NAMES:
        blocks = repeated_blocks(model)
        return blocks if policy == "auto" else [*blocks, *direct_parts(model, blocks)]
    if isinstance(policy, int) and not isinstance(policy, bool):
        if policy < 1:
            raise ValueError(
                f"{flag}={policy} must be at least 1: it is the minimum number of parameters of a selected module."
            )
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy  # here, as it takes time to import

        return _choose_as_torch(model, partial(size_based_auto_wrap_policy, min_num_params=policy))
    classes = getattr(policy, "_module_classes", policy)  # torch's ModuleWrapPolicy
    if isinstance(classes, str | type):
        classes = {classes}
    if isinstance(classes, Collection) and all(isinstance(name_or_class, str | type) for name_or_class in classes):
        return _choose_by_class(model, classes, flag)
    select: Any = getattr(policy, "_lambda_fn", policy)  # torch's CustomPolicy
    if not callable(select):
        raise TypeError(f"{flag}={policy!r} {_RULE}, not {name_type(policy)}.")
    if "nonwrapped_numel" in inspect.signature(select).parameters:
        return _choose_as_torch(model, select)
    return [module for module in _list_inner_first(model) if _selects(select, module, flag)]


def _selects(select: Callable[[nn.Module], Any], module: nn.Module, flag: str) -> bool:
    """Return whether a policy's function selects a module.

    A function of torch's `CustomPolicy` may return a dict of options. It selects the module if the dict is empty;
    options raise a ValueError.
    """
    selected = select(module)
    if isinstance(selected, dict) and selected:
        raise ValueError(
            f"{flag} returned the options {', '.join(selected)} for a {type(module).__name__}, but Treadle does not "
            "support options per module. Return True or False."
        )
    return isinstance(selected, dict) or bool(selected)


def _choose_as_torch(model: nn.Module, policy: Callable[..., bool]) -> list[nn.Module]:
    """Return the modules that torch's FSDP wraps for a policy with the arguments of ``torch.distributed.fsdp.wrap``."""
    chosen: dict[nn.Module, None] = {}

    def count_wrapped(module: nn.Module) -> int:
        total = sum(parameter.numel() for parameter in module.parameters())
        if not policy(module=module, recurse=True, nonwrapped_numel=total):
            return 0
        wrapped = sum(count_wrapped(child) for child in module.children() if child not in chosen)
        if module is model or isinstance(module, _LISTS) or not total:
            return wrapped
        if policy(module=module, recurse=False, nonwrapped_numel=total - wrapped):
            chosen[module] = None
            return total
        return wrapped

    count_wrapped(model)
    return list(chosen)


def self_contained(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the ``blocks`` that share no parameter, such as a tied weight, with a module outside the block."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for part in model.modules():
        for parameter in part.parameters(recurse=False):
            owners.setdefault(parameter, []).append(part)

    def alone(block: nn.Module) -> bool:
        inside = set(block.modules())
        return all(owner in inside for parameter in block.parameters() for owner in owners[parameter])

    return [block for block in blocks if alone(block)]


def direct_parts(model: nn.Module, blocks: Collection[nn.Module] = ()) -> list[nn.Module]:
    """Return the modules that methods of ``model`` call: children with parameters, including those in lists and dicts.

    torch's losses are included. Metrics are not, because they accumulate state and must not be traced. ``blocks``
    are excluded, and a child that contains some of them is replaced by its own direct parts.
    """
    parts: list[nn.Module] = []
    for child in model.children():
        if child in blocks:
            continue
        if isinstance(child, _LISTS) or any(part in blocks for part in child.modules()):
            parts += direct_parts(child, blocks)
        elif isinstance(child, nn.modules.loss._Loss) or _has_parameters_to_run(child):
            parts.append(child)
    return list(dict.fromkeys(parts))


def _has_parameters_to_run(part: nn.Module) -> bool:
    is_metric = hasattr(part, "compute") and hasattr(part, "reset")
    return not is_metric and any(True for _ in part.parameters())


def split_into_blocks(model: nn.Module, always: bool | None = None) -> list[nn.Module]:
    """Return the direct parts of ``model``, with some parts split into their repeated blocks and their other parts.

    When blocks are compiled, equal ones share one graph.

    Args:
        model: The user's module.
        always: True splits every part with repeated blocks, and False splits no part. Default: split a part if it has
            at least three times as many blocks as different kinds of blocks.
    """
    parts: list[nn.Module] = []
    outermost = repeated_blocks(model)
    for part in direct_parts(model):
        blocks = [] if always is False or part in outermost else repeated_blocks(part)
        if blocks and (always or 3 * len(set(map(describe_kind, blocks))) <= len(blocks)):
            parts += [*blocks, *direct_parts(part, blocks)]
        else:
            parts.append(part)
    return list(dict.fromkeys(parts))


def describe_kind(module: nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for modules with the same class, ``repr``, and parameter shapes and dtypes.

    Args:
        module: Module to describe.
    """
    return type(module), repr(module), tuple((p.shape, p.dtype) for p in module.parameters())


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost repeated submodules, each of which has the class of another module in the same list.

    A list is a ``ModuleList``, ``ModuleDict`` or ``Sequential``. Modules without children or without parameters are not
    returned.

    Args:
        model: The model to search.
    """
    blocks: list[nn.Module] = []

    def search(module: nn.Module) -> None:
        children = list(module.children())
        kinds = [type(child) for child in children]
        for child, kind in zip(children, kinds, strict=True):
            listed = isinstance(module, (*_LISTS, nn.Sequential)) and kinds.count(kind) > 1
            if listed and any(True for _ in child.children()) and any(True for _ in child.parameters()):
                blocks.append(child)
            else:
                search(child)

    search(model)
    return list(dict.fromkeys(blocks))


def _list_inner_first(model: nn.Module) -> list[nn.Module]:
    """Return the submodules of ``model`` with parameters, inner modules first, except lists and dicts of modules."""
    parts = list(reversed(list(model.modules())))[:-1]
    return [part for part in parts if not isinstance(part, _LISTS) and any(True for _ in part.parameters())]


def _choose_by_class(model: nn.Module, classes: Collection[Any], flag: str) -> list[nn.Module]:
    kinds = {type(part) for part in model.modules()}
    for name_or_class in classes:
        candidates = [kind.__name__ for kind in kinds] if isinstance(name_or_class, str) else kinds
        if name_or_class not in candidates and not (
            isinstance(name_or_class, type) and any(issubclass(kind, name_or_class) for kind in kinds)
        ):
            name = name_or_class if isinstance(name_or_class, str) else name_or_class.__name__
            names = sorted({kind.__name__ for kind in kinds - {type(model)}})
            listed = f" Its module classes are {', '.join(names[:8])}{', ...' * (len(names) > 8)}." if names else ""
            raise ValueError(
                f"{flag} names {name}, but {type(model).__name__} has no module of this class."
                f"{nearest(name, names) or listed}"
            )
    types = tuple(entry for entry in classes if isinstance(entry, type))
    names = [entry for entry in classes if isinstance(entry, str)]
    return [part for part in _list_inner_first(model) if isinstance(part, types) or type(part).__name__ in names]


def check_policy(policy: Any, flag: str) -> Any:
    """Check that a policy is neither a bool nor an unknown lower-case name, and return it."""
    if isinstance(policy, bool):
        raise TypeError(f"{flag}={policy!r} {_RULE}, not a bool.")
    if isinstance(policy, str) and policy.islower() and policy not in _NAMES:
        raise ValueError(
            f"{flag}={policy!r} must be 'auto', 'parts' or the name of a module class.{nearest(policy, _NAMES)} To "
            "select a class with a lower-case name, pass the class instead of the name."
        )
    return policy
