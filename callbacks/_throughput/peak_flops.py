"""Peak FLOPs per second of GPUs, from the vendors' data sheets."""

from __future__ import annotations

import re

import torch

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
