"""Limits of gradients for parts of a task, selected by the names of its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn

from ...common.messages import nearest
from ...common.validation import choose
from ...strategies.distributed import strip_compile_prefix

OTHERS = "*"
"""Name that stands for all parameters that no other name selects."""


def check_clip_algorithm(value: str | None) -> str | None:
    """Return ``gradient_clip_algorithm`` in lower case; None, which means ``"norm"``, is returned as it is."""
    if value is None:
        return None
    # Not str(value): Lightning's enum of the algorithms is a string, but prints its class and member.
    return choose("gradient_clip_algorithm", value.lower() if isinstance(value, str) else value, ("norm", "value"))


def check_limits(module: nn.Module, limits: Mapping[str, float]) -> None:
    """Raise a ValueError unless each name is a parameter's or the beginning of one, as ``"backbone"`` is."""
    parts = [name.split(".") for name in _name_parameters(module).values()]
    valid = list(dict.fromkeys(".".join(part[:n]) for part in parts for n in range(1, len(part) + 1)))
    for name in limits:
        if name not in valid and name != OTHERS:
            raise ValueError(
                f"gradient_clip_val has a limit for {name!r}, but {type(module).__name__} has no parameter whose name "
                f"begins with {name!r}.{nearest(name, valid)} Use the name of a submodule, such as {valid[0]!r}, or "
                f"{OTHERS!r} for all other parameters."
            )


def split_by_limit(
    module: nn.Module, parameters: Iterable[Tensor], limits: Mapping[str, float]
) -> Iterator[tuple[float, list[Tensor]]]:
    """Yield each limit with those of the parameters that it applies to; the longest matching name decides."""
    names, groups = _name_parameters(module), {name: list[Tensor]() for name in limits}
    for parameter in parameters:
        name = names.get(id(parameter), "")
        while name and name not in limits:
            name = name.rpartition(".")[0]
        if (name or OTHERS) in limits:
            groups[name or OTHERS].append(parameter)
    return ((limits[name], group) for name, group in groups.items() if group and limits[name])


def _name_parameters(module: nn.Module) -> dict[int, str]:
    return {id(parameter): strip_compile_prefix(name) for name, parameter in module.named_parameters()}
