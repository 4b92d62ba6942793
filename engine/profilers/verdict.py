"""Verdict on a run in one sentence: what the run waits for, from the durations of its actions."""

from __future__ import annotations

from collections.abc import Mapping

ENOUGH = 0.2
"""Share of the time above which something other than the computation is reported as what a run waits for."""

COMPUTING = ("forward", "backward", "optimizer", "zero_grad", "clip", "agree", "test_step", "predict_step")
_KINDS = {
    "data": ("waits for data", "load it in more processes, or make the transforms faster"),
    "transfer": ("moves batches to the device", "DataLoader(pin_memory=True) overlaps the copy with the computation"),
    "logging": ("reduces and writes logged values", "raise log_every_n_steps, or log fewer values"),
    "validation": ("validates", "raise val_check_interval, or set limit_val_batches"),
    "checkpoint": ("saves checkpoints", "save less often, or use ModelCheckpoint(async_save=True)"),
}


class Action:
    """Measurements of one action.

    Attributes:
        calls: Number of runs.
        total: Seconds spent in it; in a recursion, only the outermost run counts.
        exclusive: Seconds spent in it outside of nested actions.
        longest: Seconds of its longest run.
        first: ``exclusive`` of its first run, which takes longer than others: it starts workers, compiles, allocates
            memory.
        device_total, device_exclusive, device_first: The same on the device's clock.
    """

    __slots__ = ("calls", "device_exclusive", "device_first", "device_total", "exclusive", "first", "longest", "total")

    def __init__(self) -> None:
        self.calls = 0
        self.total = self.exclusive = self.longest = self.first = 0.0
        self.device_total = self.device_exclusive = 0.0
        self.device_first: float | None = None


def kind_of(name: str, alone: bool = False) -> str:
    """Return the kind of an action: computing, one of the usual kinds, or the action itself.

    Args:
        name: The action.
        alone: Whether nothing is trained, so that a validation counts as computing.
    """
    if name in COMPUTING or (alone and name == "validation_step"):
        return "computing"
    if not alone and (name.startswith("validation") or ".on_validation_" in name or name.endswith("of validation")):
        return "validation"
    return next((kind for kind in _KINDS if name.startswith(kind)), name)


def verdict(actions: Mapping[str, Action], advice: Mapping[str, str], on_device: bool) -> str:
    """Describe what takes most of the time besides the computation, and what would help.

    The first run of every action is excluded if there are others, because it takes longer. Time before and after the
    loop is excluded too.

    Args:
        actions: The measurements, by action.
        advice: Advice that replaces the usual advice, by action.
        on_device: Whether to use the times of the device's clock.

    Returns:
        A sentence; empty if no loop was measured.
    """
    spent: dict[str, float] = {}
    alone = "forward" not in actions
    for name, action in actions.items():
        kind = kind_of(name, alone)
        exclusive, first = (
            (action.device_exclusive, action.device_first or 0.0) if on_device else (action.exclusive, action.first)
        )
        spent[kind] = spent.get(kind, 0.0) + exclusive - (first if action.calls > 1 else 0.0)
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
        return (
            f"Verdict: {subject} {does} {_to_percent(others[worst] / total)} of the time: {advice.get(worst, usual)}."
        )
    text = f"Verdict: {subject} computes {_to_percent(spent['computing'] / total)} of the time"
    if worst:
        does = _KINDS[worst][0] if worst in _KINDS else f"is in {worst}"
        text += f" and {does} {_to_percent(others[worst] / total)} of it"
    return text + "."


def _to_percent(share: float) -> str:
    return f"{100 * share:.0f} %"
