"""Which parts of a model are sharded, or recomputed, as one: policies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from ..common.messages import nearest
from ..common.validation import choose

# A name, a class or several, a number of parameters, or a function of a module.
Policy = str | type[nn.Module] | Collection[type[nn.Module] | str] | int | Callable[..., bool]
_LISTS = (nn.ModuleList, nn.ModuleDict)
_NAMES = ("auto", "parts")


def chosen_blocks(model: nn.Module, policy: Policy, flag: str) -> list[nn.Module]:
    """The modules of ``model`` that ``policy`` picks, inner ones before those around them; never ``model`` itself.

    Args:
        model: the user's module.
        policy: ``"auto"`` (the repeated blocks), ``"parts"`` (these, and what lies beside them, such as an embedding
            and a head, each by itself), classes or their names, the least number of parameters, or ``f(module) ->
            bool``. torch's and Lightning's policy objects for FSDP are understood.
        flag: the argument's name, for errors.

    Raises:
        ValueError: if classes are named that the model has none of, or the number is not positive.
        TypeError: for anything else.
    """
    if isinstance(policy, str) and policy in _NAMES:
        blocks = repeated_blocks(model)
        return blocks if policy == "auto" else [*blocks, *direct_parts(model, blocks)]
    if isinstance(policy, int) and not isinstance(policy, bool):
        return _choose_by_size(model, policy, flag)
    classes = getattr(policy, "_module_classes", policy)  # torch's ModuleWrapPolicy
    if isinstance(classes, str | type):
        classes = {classes}
    if isinstance(classes, Collection) and all(isinstance(name_or_class, str | type) for name_or_class in classes):
        return _choose_by_class(model, classes, flag)
    if not callable(policy):
        raise TypeError(
            f"{flag}={policy!r} must be 'auto', module classes, a number of parameters or a function of a module."
        )
    size = _read_min_size(policy)
    if size is not None:
        return _choose_by_size(model, size, flag)
    return [module for module in _list_inner_first(model) if policy(module)]


def self_contained(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Those of ``blocks`` that share no parameter with a part of ``model`` outside: a tied weight is gathered once."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for part in model.modules():
        for parameter in part.parameters(recurse=False):
            owners.setdefault(parameter, []).append(part)

    def alone(block: nn.Module) -> bool:
        inside = set(block.modules())
        return all(owner in inside for parameter in block.parameters() for owner in owners[parameter])

    return [block for block in blocks if alone(block)]


def direct_parts(model: nn.Module, blocks: Collection[nn.Module] = ()) -> list[nn.Module]:
    """What a method of ``model`` calls: its children with parameters, and those in its lists and dicts of modules.

    torch's losses are among them. A torchmetrics metric is none, even one with a network in it: it counts, and is not
    to be traced.

    Args:
        model: the user's module.
        blocks: left out; of a child with some of these inside, the children are taken in its place.
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
    """The direct parts of ``model``; of one that repeats a block, the blocks and what is beside them.

    Compiled so, blocks that are alike share one graph: a transformer of 24 layers takes a layer's time.

    Args:
        model: the user's module.
        always: split each part that repeats a block. By default only if, of the blocks, two in three are like another:
            the stages of a convolutional network differ in width, and nothing would be shared. False splits none.
    """
    parts: list[nn.Module] = []
    for part in direct_parts(model):
        blocks = [] if always is False else repeated_blocks(part)
        if blocks and (always or 3 * len(set(map(describe_kind, blocks))) <= len(blocks)):
            parts += [*blocks, *direct_parts(part, blocks)]
        else:
            parts.append(part)
    return list(dict.fromkeys(parts))


def describe_kind(module: nn.Module) -> tuple[Any, ...]:
    """What is the same for modules that compute alike, with parameters of their own."""
    return type(module), repr(module), tuple((p.shape, p.dtype) for p in module.parameters())


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost parts that come more than once: layers of one class, with parts of their own, in one list."""
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
    """Every part of ``model`` that can be called and has parameters, without itself."""
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
            raise ValueError(
                f"{flag} names {name}, but {type(model).__name__} has no such module."
                f"{nearest(name, sorted(kind.__name__ for kind in kinds))}"
            )
    types = tuple(entry for entry in classes if isinstance(entry, type))
    names = [entry for entry in classes if isinstance(entry, str)]
    return [part for part in _list_inner_first(model) if isinstance(part, types) or type(part).__name__ in names]


def _choose_by_size(model: nn.Module, least: int, flag: str) -> list[nn.Module]:
    if least < 1:
        raise ValueError(f"{flag}={least} must be a number of parameters of at least 1.")
    chosen: list[nn.Module] = []
    covered: set[Any] = set()
    for part in _list_inner_first(model):
        uncovered = {parameter for parameter in part.parameters() if parameter not in covered}
        if sum(parameter.numel() for parameter in uncovered) >= least:
            chosen.append(part)
            covered |= uncovered
    return chosen


def _read_min_size(policy: Any) -> int | None:
    """The number in torch's ``functools.partial(size_based_auto_wrap_policy, min_num_params=...)``."""
    parameters = inspect.signature(policy).parameters
    if "nonwrapped_numel" not in parameters:
        return None
    return int(getattr(policy, "keywords", {}).get("min_num_params", 100_000_000))


def check_policy(policy: Any, flag: str) -> Any:
    """Refuse a policy by a name that is none, before there is a model to look at."""
    if isinstance(policy, bool):
        raise TypeError(f"{flag}={policy!r} must be 'auto', module classes, a number of parameters or a function.")
    if isinstance(policy, str) and policy.islower():
        choose(flag, policy, _NAMES)
    return policy
