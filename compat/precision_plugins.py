"""Precisions as Lightning's plugins, such as ``Trainer(plugins=DoublePrecision())``."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import nn

from ..common.messages import nearest
from ..common.optional import require
from ..strategies import Precision

__all__ = ["BitsandbytesPrecision", "DoublePrecision", "FSDPPrecision", "HalfPrecision", "MixedPrecision"]

_MODES: dict[str, dict[str, Any]] = {  # arguments of Params4bit or Int8Params
    "nf4": {"quant_type": "nf4", "compress_statistics": False, "requires_grad": False},
    "nf4-dq": {"quant_type": "nf4", "compress_statistics": True, "requires_grad": False},
    "fp4": {"quant_type": "fp4", "compress_statistics": False, "requires_grad": False},
    "fp4-dq": {"quant_type": "fp4", "compress_statistics": True, "requires_grad": False},
    "int8": {"has_fp16_weights": False, "requires_grad": False},
    "int8-training": {"has_fp16_weights": True, "requires_grad": True},
}
_NAMES = {torch.float16: "16-true", torch.bfloat16: "bf16-true", torch.float32: "32-true"}


class _Named(Precision):
    """Precision that is built from its name."""

    names: tuple[str, ...] = ()
    scaler: Any = None  # that of a run is `trainer.precision_plugin.scaler`

    def __init__(self, precision: str, scaler: Any = None) -> None:
        if precision not in self.names:
            raise ValueError(f"{type(self).__name__}: precision={precision!r} is not one of {', '.join(self.names)}.")
        if scaler is not None:
            raise ValueError(
                f"{type(self).__name__}: scaler={type(scaler).__name__}(...) is not supported, because a run creates "
                "its own gradient scaler. Remove scaler, or use an Accelerator with "
                "kwargs_handlers=[GradScalerKwargs(init_scale=...)]."
            )
        vars(self).update(vars(Precision.parse(precision)))

    @property
    def precision(self) -> str:
        """Name of the precision."""
        return self.name

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Convert a module's floating-point tensors to ``storage`` in place, if it is set, and return the module."""
        return self.cast_module(module)

    def convert_input(self, data: Any) -> Any:
        """Return a batch with its floating-point tensors in the dtype ``storage``, if it is set."""
        return self.cast(data)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which ``storage``, unless it is None, is the default dtype of new tensors."""
        return nullcontext() if self.storage is None else Precision.context(self, torch.device("cpu")) or nullcontext()

    module_init_context = tensor_init_context


class MixedPrecision(_Named):
    """Precision that keeps the dtype of the weights, usually float32, and computes in a 16-bit format with autocast.

    Args:
        precision: ``"16-mixed"`` or ``"bf16-mixed"``.
        device: Device for `forward_context`, such as ``"cuda"``. The Trainer ignores it.
        scaler: Must be None, because a run creates its own gradient scaler.
    """

    names = ("16-mixed", "bf16-mixed")

    def __init__(self, precision: str, device: str, scaler: Any = None) -> None:
        super().__init__(precision, scaler)
        vars(self).update(device=device)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the autocast context for ``device``."""
        return self.context(torch.device(self.device)) or nullcontext()  # type: ignore[attr-defined]

    autocast_context_manager = forward_context


class HalfPrecision(_Named):
    """Precision with weights and computations in a 16-bit format.

    Args:
        precision: ``"16-true"`` (default) or ``"bf16-true"``.
    """

    names = ("bf16-true", "16-true")

    def __init__(self, precision: str = "16-true") -> None:
        super().__init__(precision)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return a context in which new floating-point tensors are 16-bit by default."""
        return self.tensor_init_context()


class DoublePrecision(_Named):
    """Precision with weights and computations in float64."""

    names = ("64-true",)

    def __init__(self) -> None:
        super().__init__("64-true")

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return a context in which new floating-point tensors are float64 by default."""
        return self.tensor_init_context()


class FSDPPrecision(_Named):
    """Precision for sharded models.

    Args:
        precision: ``"32-true"``, ``"16-true"``, ``"bf16-true"``, ``"16-mixed"`` or ``"bf16-mixed"``.
        scaler: Must be None, because a run creates its own gradient scaler.
    """

    names = ("32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed")

    def __init__(self, precision: str, scaler: Any = None) -> None:
        super().__init__(precision, scaler)


class BitsandbytesPrecision(HalfPrecision):
    """Precision that stores the weights of linear layers in 4 or 8 bits, with the library bitsandbytes.

    Each `torch.nn.Linear` becomes a layer of bitsandbytes. Its weight is not trained, except with ``"int8-training"``.
    All other tensors are stored in ``dtype``. Weights loaded later into the model are quantized then.

    Args:
        mode: ``"nf4"``, ``"fp4"``, these with ``"-dq"`` (double quantization), ``"int8"``, or ``"int8-training"``,
            which keeps weights in float16 and multiplies 8-bit copies of them.
        dtype: Dtype of computations and of all other tensors. Default: bfloat16 if the GPU supports it and ``mode`` is
            one of 4 bits, otherwise float16, the only one for 8 bits.
        ignore_modules: Names of submodules, or their beginnings, in which linear layers are kept. Default: none.

    Raises:
        ModuleNotFoundError: If bitsandbytes is not installed.
        ValueError: If ``mode`` or ``dtype`` is invalid.

    Examples:
        >>> import torch
        >>> import treadle as tl
        >>> from treadle.compat.plugins import BitsandbytesPrecision
        >>> plugin = BitsandbytesPrecision("nf4", torch.bfloat16, ignore_modules={"head"})
        >>> tl.Trainer(plugins=plugin, accelerator="cpu", logger=False).precision
        'bf16-true'

    Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (arXiv:2305.14314).
    """

    mode: str
    ignore_modules: tuple[str, ...]

    def __init__(
        self, mode: str, dtype: torch.dtype | None = None, ignore_modules: Iterable[str] | None = None
    ) -> None:
        require("BitsandbytesPrecision", "bitsandbytes", extra="bitsandbytes")
        if mode not in _MODES:
            raise ValueError(f"mode={mode!r} is not one of {', '.join(_MODES)}.{nearest(str(mode), _MODES)}")
        has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        dtype = dtype or (torch.bfloat16 if has_bf16 and not mode.startswith("int8") else torch.float16)
        allowed = (torch.float16,) if mode.startswith("int8") else tuple(_NAMES)
        if dtype not in allowed:
            raise ValueError(f"mode={mode!r} only works with `dtype={' or '.join(map(str, allowed))}`, not {dtype}.")
        Precision.__init__(self, name=_NAMES[dtype], storage=dtype)
        vars(self).update(mode=mode, ignore_modules=tuple(ignore_modules or ()))

    def cast_module(self, module: nn.Module) -> nn.Module:
        """Replace linear layers by quantized ones, cast all else to ``dtype``, in place, and return the module."""
        layers = [(name, layer) for name, layer in module.named_modules() if name and isinstance(layer, nn.Linear)]
        if not layers:
            raise TypeError(
                f"{type(self).__name__}: {type(module).__name__} has no submodule of type torch.nn.Linear, so nothing "
                "would be quantized. Use another precision."
            )
        for name, layer in layers:
            if type(layer) is nn.Linear and not name.startswith(self.ignore_modules):
                module.set_submodule(name, self._quantize(layer))
        return super().cast_module(module)

    def _quantize(self, linear: nn.Linear) -> nn.Module:
        layers, sizes = import_module("bitsandbytes.nn"), (linear.in_features, linear.out_features)
        with torch.device("meta"):
            if self.mode.startswith("int8"):
                layer = layers.Linear8bitLt(*sizes, has_fp16_weights=self.mode != "int8", threshold=6.0)
            else:
                layer = layers.Linear4bit(*sizes, compute_dtype=self.storage)
        layer.weight, layer.bias = self._hold(layer, linear.weight), linear.bias
        layer.register_load_state_dict_pre_hook(self._load)
        return layer.train(linear.training)

    def _hold(self, layer: Any, weight: torch.Tensor) -> nn.Parameter:
        """Return a weight as a parameter, which its next ``to(device)`` quantizes."""
        layers = import_module("bitsandbytes.nn")
        weight = weight.detach().to("cpu", self.storage)  # bitsandbytes 0.50 quantizes int8 on its way from the CPU
        if self.mode.startswith("int8"):
            return layers.Int8Params(weight, **_MODES[self.mode])
        return layers.Params4bit(weight, module=layer, **_MODES[self.mode])

    def _load(self, layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Set the weight to that of a state dict, before torch copies the tensors of equal shapes."""
        layers = import_module("bitsandbytes.nn")
        name, device = f"{prefix}weight", layer.weight.device
        weight, scales = state.get(name), state.get(f"{prefix}SCB")
        statistics = {key: state.pop(key) for key in list(state) if key.startswith(f"{name}.")}
        if statistics:
            layer.weight = layers.Params4bit.from_prequantized(weight, statistics, device=device, module=layer)
        elif scales is not None:
            weight = state[name].to(device)
            layer.weight = layers.Int8Params(weight, requires_grad=False, CB=weight, SCB=scales.to(device))
        elif weight is not None and weight.is_floating_point() and not layer.weight.is_floating_point():
            layer.weight = self._hold(layer, weight).to(device)
        else:
            return
        state[name] = layer.weight.data
