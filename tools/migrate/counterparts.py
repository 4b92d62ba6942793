"""Treadle's counterparts of names in Lightning, Fabric and Accelerate (the peers)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, TypeGuard

from ...common.peer_names import Answer, is_module, read_names

# Sorted by the length of the prefix, longest first: `lightning.pytorch` is not the module `pytorch` of `lightning`.
_ROOTS = {
    "lightning.pytorch": "lightning",
    "lightning.fabric": "fabric",
    "pytorch_lightning": "lightning",
    "lightning_fabric": "fabric",
    "accelerate": "accelerate",
    "lightning": "umbrella",
    "treadle.compat": "compat",
    "treadle": "treadle",
}
_OURS = ("treadle", "treadle.compat")
_RAY = ("treadle.compat.ray", None)
_OPTUNA = ("treadle.integrations", ("PyTorchLightningPruningCallback",))
# Modules of other libraries that integrate Lightning: Treadle's module, and the names that it replaces (None: all).
_INTEGRATIONS: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "ray.train.lightning": _RAY,
    "ray.tune.integration.pytorch_lightning": _RAY,
    "optuna.integration": _OPTUNA,
    "optuna.integration.pytorch_lightning": _OPTUNA,
    "optuna_integration": _OPTUNA,
    "optuna_integration.pytorch_lightning": _OPTUNA,
}
PEER_PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric", "accelerate")
"""Top-level packages whose imports are replaced."""
MISSING = object()
"""Return value of `look_up` for a missing name."""


@dataclass(frozen=True)
class PeerModule:
    """Module of Lightning, Fabric, Accelerate or Treadle.

    Attributes:
        peer: ``"lightning"``, ``"fabric"`` or ``"accelerate"``; ``"umbrella"`` for the package `lightning` itself and
            its other modules; ``"treadle"`` or ``"compat"`` for a module of Treadle.
        path: The module's dotted path below the peer's root package; ``""`` for the root.
    """

    peer: str
    path: str

    @property
    def is_ours(self) -> bool:
        """Return whether this is a module of Treadle, not of a peer."""
        return self.peer in ("treadle", "compat")


@cache
def split_peer(module: str) -> PeerModule | None:
    """Return the module of a peer or of Treadle that an import names; None for any other module."""
    for prefix, peer in _ROOTS.items():
        if module == prefix or module.startswith(f"{prefix}."):
            return PeerModule(peer, module[len(prefix) + 1 :])
    return None


@cache
def list_modules(module: PeerModule) -> tuple[str, ...]:
    """Return the names of the Treadle modules that correspond to a peer's module, in order of preference."""
    if module.peer == "umbrella" and module.path:  # `lightning.data`; all others are below lightning.pytorch
        return ()
    roots = {"treadle": ("treadle",), "compat": ("treadle.compat",), "fabric": ("treadle.compat.fabric", *_OURS)}
    names = (f"{root}.{module.path}".rstrip(".") for root in roots.get(module.peer, _OURS))
    return tuple(name for name in names if is_module(name))


def find_module(module: str) -> str | None:
    """Return the name of the Treadle module that corresponds to a peer's module, or None."""
    peer = split_peer(module)
    return None if peer is None else next(iter(list_modules(peer)), None)


def find_integration(module: str | None, name: str) -> str | None:
    """Return the Treadle module that replaces a name of another library's Lightning integration, or None."""
    ours, replaced = _INTEGRATIONS.get(module or "", ("", ()))
    is_replaced = bool(ours) and (name in list_exports(ours) if replaced is None else name in replaced)
    return ours if is_replaced else None


@cache
def find_counterpart(module: str, name: str) -> str | Answer | None:
    """Return the Treadle module that provides a peer's name; otherwise, advice on a replacement, or None.

    If the module at the same path lacks the name, the parent packages are searched, because older versions of the peers
    define some names in other submodules, such as `core.lightning.LightningModule`.
    """
    peer = split_peer(module)
    while peer is not None:
        for ours in list_modules(peer):
            if look_up(ours, name) is not MISSING:
                return ours
        answer = find_answer(peer, name)
        if answer is not None or peer.is_ours or peer.peer == "umbrella" or not peer.path:
            return answer
        peer = PeerModule(peer.peer, peer.path.rpartition(".")[0])
    return None


def find_answer(module: PeerModule, name: str) -> Answer | None:
    """Return the advice in the tables of ``compat/`` about a name without a counterpart, or None."""
    answer = read_names(module.path).get(name)
    return answer if isinstance(answer, Answer) else None


def describe_missing(module: str, name: str) -> str:
    """Return the text of the finding about a name without a counterpart."""
    peer = split_peer(module)
    answer = None if peer is None else find_answer(peer, name)
    return f"{module}.{name} has no counterpart in Treadle." if answer is None else f"{module}.{name}: {answer}"


def look_up(module: str, name: str) -> Any:
    """Return an attribute of a Treadle module, or `MISSING`."""
    namespace = vars(importlib.import_module(module))
    value = namespace.get(name, MISSING)
    ask = namespace.get("__getattr__")
    # An imported submodule may hide the name that its package exports, such as `tqdm` in `utils`.
    if ask is None or (value is not MISSING and not isinstance(value, ModuleType)):
        return value
    try:
        return ask(name)
    except (AttributeError, ImportError):
        return value


def list_exports(module: str) -> set[str]:
    """Return the names that a star import of a module of Treadle binds."""
    exported = look_up(module, "__all__")
    if exported is MISSING:
        exported = [name for name in vars(importlib.import_module(module)) if not name.startswith("_")]
    return set(exported)


def follow_attributes(module: str, attributes: Sequence[str]) -> tuple[int, bool]:
    """Follow attributes from a Treadle module through its submodules to the first name that is not a module.

    Returns:
        The number of attributes that were followed, and whether the last one exists.
    """
    for count, name in enumerate(attributes, 1):
        value = look_up(module, name)
        if not _is_ours(value):
            return count, value is not MISSING
        module = value.__name__
    return len(attributes), True


def find_submodule(module: str, name: str) -> str | None:
    """Return the peer's module that ``from module import name`` imports; None if ``name`` is not a module."""
    if module == "lightning" and name in ("pytorch", "fabric"):
        return f"{module}.{name}"
    home = find_counterpart(module, name)
    if home is None or isinstance(home, Answer):
        return None
    return f"{module}.{name}" if _is_ours(look_up(home, name)) else None


def find_dotted(dotted: str) -> str | None:
    """Return Treadle's name for a peer's dotted name; None for a module or a name without a counterpart."""
    parts = dotted.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module, names = ".".join(parts[:count]), parts[count:]
        home = find_counterpart(module, names[0])
        if home is not None and not isinstance(home, Answer):
            return None if find_submodule(module, names[0]) else ".".join([home, *names])
    return None


def _is_ours(value: Any) -> TypeGuard[ModuleType]:
    return isinstance(value, ModuleType) and value.__name__.partition(".")[0] == "treadle"
