"""Queries about layers of torchao, bitsandbytes and Transformer Engine."""

from __future__ import annotations

import torch
from torch import nn

from ..engine.big_models import group_tied_names, named_tensors


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of a model's first and last linear layer, or ``(None, None)`` if it has no linear layer."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: list[str]) -> bool:
    """Return whether torchao should convert the module with the name ``fqn`` to float8.

    Modules in ``layers_to_filter``, and linear layers whose sizes are not multiples of 16, are not converted.
    """
    if isinstance(module, nn.Linear) and (module.in_features % 16 or module.out_features % 16):
        return False
    return fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Return the result of `filter_linear_layers`, excluding the first and last linear layer in ``module``."""
    return filter_linear_layers(module, fqn, [name for name in find_first_last_linear_layers(module) if name])


def has_ao_layers(model: nn.Module) -> bool:
    """Return True if a model has float8 layers of torchao."""
    return _has_layers(model, "torchao", {"Float8Linear"})


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Return True if a model has 4-bit layers of bitsandbytes."""
    return _has_layers(model, "bitsandbytes", {"Linear4bit"})


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Return True if a model has layers of Transformer Engine."""
    return _has_layers(model, "transformer_engine", {"LayerNorm", "Linear", "TransformerLayer"})


def _has_layers(model: nn.Module, package: str, names: set[str]) -> bool:
    # By name, because importing the package would initialize the accelerator, and without the package there are no such
    # layers.
    return any(
        kind.__name__ in names and kind.__module__.partition(".")[0] == package
        for module in model.modules()
        for kind in type(module).__mro__
    )


def get_parameter_device(parameter: nn.Module) -> torch.device:
    """Return the device of a module's first parameter."""
    return next(parameter.parameters()).device


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Return the names of modules that quantization should skip: those with tied weights, and the last child module.

    For a base model of Transformers without tied weights, the list is empty, because the model has no head.
    """
    tensors = {name: tensor for name, tensor in named_tensors(model).items() if isinstance(tensor, nn.Parameter)}
    tied = [name for names in group_tied_names(tensors) if len(names) > 1 for name in names]
    prefix = getattr(model, "base_model_prefix", None)
    if not tied and prefix is not None and not hasattr(model, prefix):
        return []  # a base model has no head
    last = [name for name, _ in model.named_children()][-1:]
    return [name.replace(".weight", "").replace(".bias", "") for name in dict.fromkeys([*tied, *last])]
