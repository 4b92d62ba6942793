"""Quantization by torchao, for inference and for training."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from ..common.messages import announce, nearest, warn
from ..common.optional import require
from ..common.validation import choose

GROUP = 32
"""Number of int4 weights that share a scale."""
_EXTRA = "quantization"
_MULTIPLE = 16  # torch's float8 products require both sizes to be multiples of it


class WeightQuantizer:
    """Quantizer that rounds the weights of ``nn.Linear`` to eight or four bits, for inference only.

    Matrix products are computed in the model's own dtype. The quantizer requires ``pip install treadle[quantization]``.

    Args:
        bits: ``"int8"`` or ``"int4"``.
        skip: Names of modules to leave unchanged, such as ``["lm_head"]``, including their submodules. Default: none.

    Raises:
        ValueError: If ``bits`` is unknown.
        ModuleNotFoundError: If torchao is not installed.
        ImportError: If torchao cannot be imported with this version of torch.

    Source: https://docs.pytorch.org/ao/stable/quantized_inference.html
    """

    def __init__(self, bits: str, skip: Collection[str] = ()) -> None:
        self.bits = choose("quantization", bits, ("int8", "int4"))
        self.skip = tuple(skip)
        _require_torchao(f"quantization={bits!r}", "torchao.quantization")

    @classmethod
    def parse(cls, value: str | WeightQuantizer | None) -> WeightQuantizer | None:
        """Return the quantizer for ``"int8"`` or ``"int4"``; a quantizer or None is returned unchanged."""
        return value if value is None or isinstance(value, WeightQuantizer) else cls(value)

    def select(self, model: nn.Module) -> dict[str, nn.Linear]:
        """Return the ``nn.Linear`` layers to round, by name.

        Raises:
            ValueError: If ``skip`` names a module that the model does not have.
        """
        names = {name for name, _ in model.named_modules()}
        if unknown := [name for name in self.skip if name not in names]:
            raise ValueError(
                f"skip contains {unknown[0]!r}, but {type(model).__name__} has no module with this name."
                f"{nearest(unknown[0], names) or ' model.named_modules() lists the names.'}"
            )
        uses: dict[torch.Tensor, int] = {}
        for part in model.modules():
            for parameter in part.parameters(recurse=False):
                uses[parameter] = uses.get(parameter, 0) + 1
        return {name: part for name, part in model.named_modules() if self._applies(name, part, uses)}  # type: ignore[misc]

    def _applies(self, name: str, part: nn.Module, uses: dict[torch.Tensor, int]) -> bool:
        if type(part) is not nn.Linear or uses[part.weight] > 1 or part.weight.is_complex():
            return False
        if any(name == skipped or name.startswith(f"{skipped}.") for skipped in self.skip):
            return False
        return self.bits == "int8" or part.in_features % GROUP == part.out_features % 16 == 0

    def round(self, layer: nn.Linear) -> None:
        """Round the weight of ``layer`` in place."""
        from torchao.quantization import quantize_

        quantize_(layer, self._make_config(layer.weight.device))

    def _make_config(self, device: torch.device) -> Any:
        from torchao import quantization

        if self.bits == "int8":
            return quantization.Int8WeightOnlyConfig()
        if device.type == "cpu":
            from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

            return PrototypeInt4WeightOnlyConfig(group_size=GROUP)
        return quantization.Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d")


def _require_torchao(needed_by: str, module: str) -> None:
    """Check that torchao is installed and that its module can be imported: some releases fail with older torch."""
    require(needed_by, "torchao", extra=_EXTRA)
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{needed_by} needs torchao, but torchao {importlib.metadata.version('torchao')} cannot be imported with "
            f"torch {torch.__version__}: {error}. Update torch, or install a torchao release made for this torch: "
            "https://github.com/pytorch/ao/issues/2919 lists which versions work together.",
            name=error.name,
        ) from error


def convert_to_float8(model: nn.Module, device: torch.device) -> None:
    """Convert linear layers so that their forward and backward matrix products are computed in float8.

    Layers whose sizes are not multiples of 16, instances of subclasses of ``nn.Linear``, and ``model`` itself are not
    converted.

    Raises:
        ModuleNotFoundError: If torchao is not installed.
        ImportError: If torchao cannot be imported with this version of torch.
        ValueError: If the GPU does not support float8.

    Source: https://github.com/pytorch/ao/tree/main/torchao/float8
    """
    _require_torchao("precision='float8'", "torchao.float8")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(
            f"precision='float8', but {torch.cuda.get_device_name(device)} does not support float8, which needs an "
            "Ada, Hopper or newer GPU. Use precision='bf16-mixed'."
        )
    if any(_is_float8(part) for part in model.modules()):
        return
    linear = (part for part in model.modules() if type(part) is nn.Linear and part is not model)
    layers = [part for part in linear if not part.weight.is_complex()]
    chosen = {layer for layer in layers if layer.in_features % _MULTIPLE == layer.out_features % _MULTIPLE == 0}
    if not chosen:
        warn(
            f"precision='float8', but {type(model).__name__} has no nn.Linear submodule whose in_features and "
            f"out_features are multiples of {_MULTIPLE}, so nothing is computed in float8."
        )
        return
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(model, module_filter_fn=lambda part, name: part in chosen)
    announce(f"float8 is used in {len(chosen)} of {len(layers)} linear layers of {type(model).__name__}.")


def _is_float8(part: nn.Module) -> bool:
    return type(part).__name__ == "Float8Linear"
