"""Verdict on the bottleneck of a run, from the durations of its actions."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

ENOUGH = 0.2
"""Minimum share of the time at which the verdict reports work other than computation as the bottleneck."""

COMPUTING = ("forward", "backward", "optimizer", "zero_grad", "clip", "agree", "test_step", "predict_step")
_KINDS = {
    "data": ("waits for data", "Load it in more processes, or make the transforms faster."),
    "transfer": ("moves batches to the device", "DataLoader(pin_memory=True) overlaps the copy with the computation."),
    "logging": ("reduces and writes logged values", "Raise log_every_n_steps, or log fewer values."),
    "validation": ("validates", "Raise val_check_interval, or set limit_val_batches."),
    "checkpoint": ("saves checkpoints", "Save less often, or use ModelCheckpoint(async_save=True)."),
}


class Action:
    """Measurements of all calls of one action, in seconds.

    Attributes:
        calls: Number of completed calls.
        durations: Duration of each call, 8 bytes per call.
        total: Time spent in the action; in a recursion, only the outermost call counts.
        exclusive: Time spent in the action outside of nested actions.
        longest: Duration of the longest call.
        first: ``exclusive`` of the first call, which often takes longer.
        device_total, device_exclusive, device_first: The same in device time, if it is measured.
    """

    __slots__ = (
        *("calls", "device_exclusive", "device_first", "device_total", "durations", "exclusive", "first", "longest"),
        "total",
    )

    def __init__(self) -> None:
        self.calls = 0
        self.durations = array("d")
        self.total = self.exclusive = self.longest = self.first = 0.0
        self.device_total = self.device_exclusive = 0.0
        self.device_first: float | None = None


def kind_of(name: str, alone: bool = False) -> str:
    """Return the category of an action, such as ``"computing"``, or the action's name if it has none.

    If ``alone``, the run does not train, so validation steps count as computing.
    """
    if name in COMPUTING or (alone and name == "validation_step"):
        return "computing"
    if not alone and (name.startswith("validation") or ".on_validation_" in name or name.endswith("of validation")):
        return "validation"
    return next((kind for kind in _KINDS if name.startswith(kind)), name)


def verdict(actions: Mapping[str, Action], advice: Mapping[str, str], on_device: bool) -> str:
    """Return a sentence about the bottleneck of the run; "" if no computation was measured.

    ``advice`` maps the names of actions to text that replaces the default advice.
    """
    spent: dict[str, float] = {}
    slowest: dict[str, tuple[float, str]] = {}  # the action of each kind that takes the most time
    alone = "forward" not in actions
    for name, action in actions.items():
        kind = kind_of(name, alone)
        exclusive, first = (
            (action.device_exclusive, action.device_first or 0.0) if on_device else (action.exclusive, action.first)
        )
        seconds = exclusive - (first if action.calls > 1 else 0.0)
        spent[kind] = spent.get(kind, 0.0) + seconds
        slowest[kind] = max(slowest.get(kind, (0.0, "")), (seconds, name))
    total = sum(spent.values())
    if "computing" not in spent or total <= 0:
        return ""
    subject = "the device" if on_device else "this run"
    others = {kind: seconds for kind, seconds in spent.items() if kind not in ("computing", "training")}
    worst = max(others, key=lambda kind: others[kind], default="")
    if worst and others[worst] / total >= ENOUGH:
        if worst not in _KINDS:
            return f"Verdict: {subject} spends {_to_percent(others[worst] / total)} of the time in {worst}."
        does, usual = _KINDS[worst]
        remedy = advice.get(slowest[worst][1], usual)
        return f"Verdict: {subject} {does} {_to_percent(others[worst] / total)} of the time. {remedy}"
    text = f"Verdict: {subject} computes {_to_percent(spent['computing'] / total)} of the time"
    if worst:
        does = _KINDS[worst][0] if worst in _KINDS else f"is in {worst}"
        text += f" and {does} {_to_percent(others[worst] / total)} of it"
    return text + "."


def _to_percent(share: float) -> str:
    return f"{100 * share:.0f} %"
