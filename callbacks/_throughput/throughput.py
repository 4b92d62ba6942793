"""Throughput rates, and the FLOPs of a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import nn

from ...common.validation import check_int, check_number


class Throughput:
    """Throughput meter that converts cumulative totals to batches, samples, items and FLOPs per second.

    Make sure that the device has finished its work before each call of `update`, for example with
    ``torch.cuda.synchronize()``.

    Args:
        available_flops: Peak FLOPs per second of one device. The rate ``device/mfu`` is the achieved fraction of this
            peak. Default: None, which omits ``device/mfu``.
        world_size: Number of devices. With several devices, rates are returned per device (``device/...``) and for all
            devices. Default: 1.
        window_size: Number of measurements that a rate covers, at least 2. Default: 100.
        separator: Text between ``device`` and the name of a rate. Default: ``"/"``.

    Raises:
        ValueError, TypeError: If an argument is invalid.

    References:
        Model FLOPs utilization (MFU): Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022,
        https://arxiv.org/abs/2204.02311.

    Example:
        >>> from treadle.callbacks import Throughput
        >>> throughput = Throughput(window_size=2)
        >>> throughput.update(time=0.0, batches=0, samples=0)
        >>> throughput.update(time=2.0, batches=10, samples=40)
        >>> throughput.compute()["device/samples_per_sec"]
        20.0
    """

    def __init__(
        self, available_flops: float | None = None, world_size: int = 1, window_size: int = 100, separator: str = "/"
    ) -> None:
        self.available_flops = (
            None if available_flops is None else check_number("available_flops", available_flops, 1.0)
        )
        self.world_size = check_int("world_size", world_size, 1)
        self.window_size = check_int("window_size", window_size, 2, "is the minimum for a rate")
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
        """Add a measurement of one device. All values except ``flops`` are totals since the start.

        Args:
            time: Elapsed time in seconds.
            batches: Number of batches.
            samples: Number of samples. If devices get different numbers, pass their mean.
            lengths: Number of items, such as tokens. Default: None, which counts no items.
            flops: Number of FLOPs since the previous call. Default: None, which counts no FLOPs.

        Raises:
            ValueError: If a total has not grown since the previous call, or if only one of the two calls passes
                ``lengths``.
        """
        row: dict[str, float] = {"time": time, "batches": batches, "samples": samples}
        if lengths is not None:
            row["lengths"] = lengths
        self._flops += flops or 0.0
        if flops is not None or self._flops:
            row["flops"] = self._flops
        if self._rows:
            before = self._rows[-1]
            if before.keys() - {"flops"} != row.keys() - {"flops"}:
                raise ValueError(
                    f"update() got the arguments {', '.join(sorted(row))}, but the previous call got "
                    f"{', '.join(sorted(before))}. Pass the same arguments in every call."
                )
            for name in row.keys() & before.keys() - {"flops"}:
                if not row[name] > before[name]:
                    raise ValueError(
                        f"{name}={row[name]} must exceed the previous total, {before[name]}. Pass cumulative totals."
                    )
        self._rows.append(row)

    def compute(self) -> dict[str, float]:
        """Return a dict of the latest totals and, once the window is full, the rates.

        Raises:
            ValueError: If `update` has not been called.
        """
        if not self._rows:
            raise ValueError("compute() was called before the first update(). Call update() first.")
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
        """Discard all measurements."""
        self._rows.clear()
        self._flops = 0.0


def measure_flops(model: nn.Module, forward_fn: Callable[[], Any], loss_fn: Callable[[Any], Any] | None = None) -> int:
    """Return the number of FLOPs of a forward pass and, with ``loss_fn``, of the loss and the backward pass.

    On the meta device, this takes almost no time or memory:

    .. code-block:: python

        with torch.device("meta"):
            model, batch = Model(), torch.randn(32, 128)
        flops = measure_flops(model, lambda: model(batch), lambda output: output.sum())

    Args:
        model: The model. Its gradients are restored afterwards.
        forward_fn: Function that runs the model.
        loss_fn: Function that computes a loss from the result of ``forward_fn``. Default: None.
    """
    from torch.utils.flop_counter import FlopCounterMode

    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    counter = FlopCounterMode(display=False)
    try:
        if loss_fn is not None:
            for parameter, _ in gradients:
                parameter.grad = None  # otherwise the backward pass would add to them
        with counter:
            output = forward_fn()
            if loss_fn is not None:
                loss_fn(output).backward()
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
    return int(counter.get_total_flops())
