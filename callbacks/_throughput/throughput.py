"""How much work is done in how much time, over a window of the newest measurements."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import nn

from ...common.validation import check_int, check_number


class Throughput:
    """Turns totals, measured now and then, into rates: batches, samples, items and operations per second.

    Measure at moments when the device has done what was asked of it: after a ``torch.cuda.synchronize()``, or after
    something was read from it. All devices are taken to be of one kind.

    Args:
        available_flops: Operations per second that one device could do at best; gives ``device/mfu``.
        world_size: Devices. With more than one, rates are given for one device (``device/...``) and for all.
        window_size: Measurements that a rate is over.
        separator: What stands between ``device`` and a rate's name.

    Raises:
        ValueError, TypeError: For a value that can't be honoured.
    """

    def __init__(
        self, available_flops: float | None = None, world_size: int = 1, window_size: int = 100, separator: str = "/"
    ) -> None:
        self.available_flops = (
            None if available_flops is None else check_number("available_flops", available_flops, 1.0)
        )
        self.world_size = check_int("world_size", world_size, 1)
        self.window_size = check_int("window_size", window_size, 2, "is what a rate needs")
        self.separator = separator
        self._rows: deque[dict[str, float]] = deque(maxlen=window_size)
        self._flops = 0.0

    def update(
        self,
        *,
        time: float,
        batches: int,
        samples: float,
        lengths: float | None = None,
        flops: float | None = None,
    ) -> None:
        """Add a measurement. All but ``flops`` are totals since the start, of one device.

        Args:
            time: Seconds.
            batches: Batches.
            samples: Samples; with devices that have unequal parts, their mean.
            lengths: Items, such as tokens.
            flops: Operations since the last measurement, as `measure_flops` counts them.

        Raises:
            ValueError: For a total that has not grown, which no rate could be made of, or where a measurement has
                other values than the one before it.
        """
        row: dict[str, float] = {"time": time, "batches": batches, "samples": samples}
        if lengths is not None:
            row["lengths"] = lengths
        if flops is not None:
            self._flops += flops
            row["flops"] = self._flops
        if self._rows:
            before = self._rows[-1]
            if before.keys() - {"flops"} != row.keys() - {"flops"}:
                raise ValueError(
                    f"a measurement of {sorted(row)} follows one of {sorted(before)}: give always the same."
                )
            for name in row.keys() & before.keys() - {"flops"}:
                if not row[name] > before[name]:
                    raise ValueError(f"{name}={row[name]} must be more than {before[name]} before: it is a total.")
        self._rows.append(row)

    def compute(self) -> dict[str, float]:
        """The newest totals, and once the window is full the rates.

        Raises:
            ValueError: Where nothing has been measured.
        """
        if not self._rows:
            raise ValueError("there is no throughput before the first update().")
        first, last = self._rows[0], self._rows[-1]
        metrics: dict[str, float] = {
            name: last[name] for name in ("time", "batches", "samples", "lengths") if name in last
        }
        if len(self._rows) < self.window_size:
            return metrics
        seconds = last["time"] - first["time"]
        names = {"batches": "batches", "samples": "samples", "lengths": "items", "flops": "flops"}
        for total, name in names.items():
            if total not in last or (total not in first and total != "flops"):
                continue
            rate = (last[total] - first.get(total, 0.0)) / seconds
            metrics[f"device{self.separator}{name}_per_sec"] = rate
            if self.world_size > 1:
                metrics[f"{name}_per_sec"] = rate * self.world_size
            if total == "flops" and self.available_flops:
                metrics[f"device{self.separator}mfu"] = rate / self.available_flops
        return metrics

    def reset(self) -> None:
        """Forget all measurements."""
        self._rows.clear()
        self._flops = 0.0


def measure_flops(model: nn.Module, forward_fn: Callable[[], Any], loss_fn: Callable[[Any], Any] | None = None) -> int:
    """Count the floating-point operations of one run of a model. On the meta device it takes no time and no memory.

    .. code-block:: python

        with torch.device("meta"):
            model, batch = Model(), torch.randn(32, 128)
        flops = measure_flops(model, lambda: model(batch), lambda output: output.sum())

    Args:
        model: The model; its gradients are as before afterwards.
        forward_fn: Runs it.
        loss_fn: Makes a loss of what ``forward_fn`` returns; then the backward is counted too.
    """
    from torch.utils.flop_counter import FlopCounterMode

    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    counter = FlopCounterMode(display=False)
    try:
        if loss_fn is not None:
            for parameter, _ in gradients:
                parameter.grad = None  # else they would be added to
        with counter:
            output = forward_fn()
            if loss_fn is not None:
                loss_fn(output).backward()
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
    return int(counter.get_total_flops())
