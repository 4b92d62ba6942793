"""Throughput of a run, and the peak FLOPS of its device."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..common.validation import check_int, check_number


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

    Examples:
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
            previous = self._rows[-1]
            if previous.keys() - {"flops"} != row.keys() - {"flops"}:
                raise ValueError(
                    f"update() got the arguments {', '.join(sorted(row))}, but the previous call got "
                    f"{', '.join(sorted(previous))}. Pass the same arguments in every call."
                )
            for name in row.keys() & previous.keys() - {"flops"}:
                if not row[name] > previous[name]:
                    raise ValueError(
                        f"{name}={row[name]} must exceed the previous total, {previous[name]}. Pass cumulative totals."
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


# In 1e12 per second: float64, float32, tf32, bfloat16, float16 (with float32 sums), int8; None if not supported.
# Without sparsity, which training rarely uses. float64 is that of the tensor cores, if they support it.
_PEAKS: dict[str, tuple[float | None, ...]] = {
    "b200": (37, 75, 1125, 2250, 2250, 4500),
    "h200 nvl": (60, 60, 417.5, 835.5, 835.5, 1671),
    "h200": (66.9, 66.9, 494.7, 989.4, 989.4, 1978.9),
    "gh200": (66.9, 66.9, 494.7, 989.4, 989.4, 1978.9),
    "h100 nvl": (60, 60, 417.5, 835.5, 835.5, 1671),
    "h100 pcie": (51.2, 51.2, 378, 756, 756, 1513),
    "h100": (66.9, 66.9, 494.7, 989.4, 989.4, 1978.9),
    "h800": (1, 66.9, 494.7, 989.4, 989.4, 1978.9),
    "h20": (1, 44, 74, 148, 148, 296),
    "a100": (19.5, 19.5, 156, 312, 312, 624),
    "a800": (19.5, 19.5, 156, 312, 312, 624),
    "a30": (10.3, 10.3, 82, 165, 165, 330),
    "a40": (None, 37.4, 74.8, 149.7, 149.7, 299.3),
    "a10g": (None, 31.5, 35, 70, 70, 140),
    "a10": (None, 31.2, 62.5, 125, 125, 250),
    "rtx a6000": (None, 38.7, 77.4, 154.8, 154.8, 309.7),
    "rtx 6000 ada": (None, 91.1, 182.1, 364.2, 364.2, 728.5),
    "l40s": (None, 91.6, 183, 362, 362, 733),
    "l40": (None, 90.5, 90.5, 181, 181, 362),
    "l4": (None, 30.3, 60, 121, 121, 242),
    "rtx 5090": (None, 104.8, 104.8, 209.5, 209.5, 838),
    "rtx 4090": (None, 82.6, 82.6, 165.2, 165.2, 660.6),
    "rtx 4080 super": (None, 52.2, 52.2, 104.4, 104.4, 417.6),
    "rtx 4080": (None, 48.7, 48.7, 97.5, 97.5, 389.9),
    "rtx 3090 ti": (None, 40, 40, 80, 80, 320),
    "rtx 3090": (None, 35.6, 35.6, 71, 71, 284),
    "rtx 3080 ti": (None, 34.1, 34.1, 68.2, 68.2, 272.8),
    "rtx 3080": (None, 29.8, 29.8, 59.5, 59.5, 238),
    "rtx 3070": (None, 20.3, 20.3, 40.6, 40.6, 162.6),
    "t4": (None, 8.1, None, None, 65, 130),
    "v100s": (8.2, 16.4, None, None, 130, None),
    "v100 pcie": (7, 14, None, None, 112, None),
    "v100": (7.8, 15.7, None, None, 125, None),
    "mi300x": (163.4, 163.4, 653.7, 1307.4, 1307.4, 2614.9),
    "mi250x": (47.9, 47.9, None, 191.5, 191.5, 191.5),  # for one of its two dies, each of which is a device
}
_FORMATS = (torch.float64, torch.float32, "tf32", torch.bfloat16, torch.float16, torch.int8)
# Words that denote another device: a slice of one, or a variant.
_OTHER = {"d", "laptop", "max", "mig", "mobile", "super", "ti"}


def get_available_flops(device: torch.device, dtype: torch.dtype | str) -> float | None:
    """Return the peak FLOPs per second of a device, without sparsity; None if they are unknown.

    Args:
        device: The device. If its type is not ``"cuda"``, the result is None.
        dtype: The dtype of the computation, or ``"tf32"``. ``torch.float32`` means TF32 if the device supports TF32 and
            ``torch.get_float32_matmul_precision()`` permits it.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    fast = dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return (look_up_peak_flops(name, "tf32") if fast else None) or look_up_peak_flops(name, dtype)


def look_up_peak_flops(name: str, dtype: torch.dtype | str) -> float | None:
    """Return the peak FLOPs per second, without sparsity, of the GPU called ``name``; None if they are unknown."""
    words = re.findall("[a-z0-9]+", name.lower())
    text = f" {' '.join(words)} "
    chip = max((chip for chip in _PEAKS if f" {chip} " in text), key=len, default="")
    if not chip or dtype not in _FORMATS or _OTHER & (set(words) - set(chip.split())):
        return None
    peak = _PEAKS[chip][_FORMATS.index(dtype)]
    return None if peak is None else peak * 1e12
