"""Forms of a checkpoint's parts: the keys of the dicts that they contain.

A checkpoint may contain these parts and those of ``save_state(parts=...)`` (see `parts` for their names and files):

=================================  ==================================================================================
``model``, ``model-1``, ...        tensors of each prepared model
``extra-model``, ...               other values in a model's state, such as results of ``get_extra_state``
``optimizer``, ``optimizer-1``     `OptimizerState` of each optimizer
``optimizer-rank-00001``, ...      the same, for the state that only rank 1 keeps (``DDP(zero=True)``)
``state``                          `TrainState`: the state that all ranks share
``rank-00000``, ...                `RankState`: the state of one rank alone
``hparams``, ``datamodule_hparams``  hyperparameters of the task and of the data module
``config``                         the configuration file of the run
``added``                          additions of ``on_save_checkpoint`` hooks, in a checkpoint of weights only
=================================  ==================================================================================

Code that writes these dicts uses the classes as types, so a type checker finds a missing or unknown key. Code that
reads them calls `check_form`, which also detects unexpected content in an intact file.
"""

# No postponed annotations here, because evaluating them would run text while a checkpoint is read.
import types
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict, TypeVar, Union, cast, get_origin, is_typeddict

from torch import Tensor

from ...common.remote_path import AnyPath
from . import filesystem
from .open_checkpoint import OpenCheckpoint
from .parts import ADDED, STATE


class TrainState(TypedDict):
    """Content of the part ``state``: the state that all ranks share. Lists are in the order of the prepared objects."""

    schedulers: list[dict[str, Any]]
    scheduler_kinds: list[str]
    scheduler_advances: list[int]
    schedules_built: list[Any]
    steps_since: list[tuple[int, int]]
    scaler: dict[str, Any] | None
    loaders: list[dict[str, Any]]
    evaluation_loaders: list[dict[str, Any]]
    stream: dict[str, Any] | None
    reduction_orders: list[list[int]]
    counts_calls: bool  # see `Accumulation.counts_calls`
    registered: dict[str, Any]


class TrainerStates(TypedDict):
    """States of the Trainer, stored in ``TrainState.registered`` next to those of the user's registered objects."""

    progress: Any
    logged: Any
    history: Any
    metrics: Any
    callbacks: Any
    datamodule: NotRequired[Any]


class CallbackStates(TypedDict):
    """Value of ``callbacks`` in `TrainerStates`: the callbacks' states by ``state_key``, and entries added by hooks."""

    callbacks: dict[str, Any]
    added: dict[str, Any]


class RandomState(TypedDict):
    """RNG state of one rank: the default generators, and the generators of its loaders' datasets."""

    python: Any
    numpy: Any
    torch: Tensor
    cuda: NotRequired[list[Tensor]]
    cuda_device: NotRequired[int]  # the device that the process computed on
    mps: NotRequired[Tensor]
    loaders: list[Any]


class RankState(TypedDict):
    """Content of the part of one rank: its RNG state, and its buffers unless all ranks resume with rank zero's."""

    random: RandomState
    buffers: list[dict[str, Tensor]]


OptimizerState = TypedDict(
    "OptimizerState",
    {
        "class": str,
        "shapes": dict[str, list[int]],
        "formats": dict[str, Any],
        "groups": list[dict[str, Any]],
        "slots": dict[str, Any],
        "unnamed": dict[Any, Any],
        "others": dict[str, Any],
        "built": NotRequired[Any],
    },
)
"""The part of one optimizer: its state under the names of its parameters, see `optimizer_state.encode_by_name`."""

Form = TypeVar("Form", TrainState, RankState, OptimizerState, CallbackStates)


def check_form(form: type[Form], value: Any, path: AnyPath, part: str) -> Form:
    """Check that ``value`` has the required keys of the TypedDict ``form`` with values of their types, and return it.

    A digest does not reveal that a part was written with unexpected content.

    Raises:
        ValueError: If ``value`` is not a dict, or required keys are missing or have values of a wrong type.
    """
    kinds = _collect_required_kinds(form)
    wrong = [
        name for name, kind in kinds.items() if not isinstance(value, dict) or not isinstance(value.get(name), kind)
    ]
    if wrong:
        listed = ", ".join(f"{name} ({kinds[name].__name__})" for name in wrong)
        text = f"{path}: part {part!r} is damaged: entries are missing or have a wrong type: {listed}"
        raise ValueError(f"{text}. {filesystem.RESTORE}")
    return cast(Form, value)


def _collect_required_kinds(form: type[Any]) -> dict[str, type]:
    """Return the required keys of a TypedDict with the class of each value, except keys whose value may be None."""
    kinds: dict[str, type] = {}
    for name, hint in form.__annotations__.items():
        kind: Any = dict if is_typeddict(hint) else get_origin(hint) or hint
        if name in form.__required_keys__ and kind not in (Union, types.UnionType):
            kinds[name] = kind
    return kinds


def open_train_state(opened: OpenCheckpoint) -> TrainState:
    """Return the state that all ranks share, without reading its tensors.

    Raises:
        ValueError: If the checkpoint contains weights only, or its part ``state`` is damaged.
    """
    if not opened.has(STATE):
        raise ValueError(
            f"{opened.path} contains only weights, so no run can resume from it. To start from these weights, use "
            "treadle.load_weights(model, path)."
        )
    return check_form(TrainState, opened.open_part(STATE), opened.path, STATE)


def open_registered(opened: OpenCheckpoint) -> dict[str, Any]:
    """Return the states of registered objects without reading tensors; empty for a checkpoint of weights only."""
    return open_train_state(opened)["registered"] if opened.has(STATE) else {}


def open_callback_states(opened: OpenCheckpoint) -> CallbackStates:
    """Return the callbacks' states and the additions of hooks without reading tensors; empty dicts if there are none.

    Args:
        opened: The checkpoint to read from.

    Raises:
        ValueError: If the checkpoint's part ``state`` is damaged.
    """
    saved = open_registered(opened).get("callbacks", {})
    if isinstance(saved, dict):  # a script without a Trainer may register another object under this name
        saved = {"callbacks": {}, "added": {}} | saved
    return check_form(CallbackStates, saved, opened.path, STATE)


def open_added(opened: OpenCheckpoint) -> Mapping[str, Any]:
    """Return the entries that ``on_save_checkpoint`` hooks added to a checkpoint, without reading their tensors."""
    if opened.has(ADDED):
        return cast(Mapping[str, Any], opened.open_part(ADDED))
    return open_callback_states(opened)["added"]
