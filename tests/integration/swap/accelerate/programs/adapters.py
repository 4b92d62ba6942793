"""Adapters put into a model whose layers have hooks: hooks made again from their class, taken off, weights listed."""

import inspect

import accelerate
import torch
from accelerate import hooks
from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook, add_hook_to_module
from accelerate.utils import is_npu_available, is_xpu_available, named_module_tensors
from accelerate.utils.imports import is_bf16_available
from torch import nn


class LoraLinear(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base_layer, self.a, self.b = base, nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.b(self.a(x))


class Scale(ModelHook):
    def pre_forward(self, module, *args, **kwargs):
        return tuple(2 * arg for arg in args), kwargs

    def post_forward(self, module, output):
        return output + 1


def recreate(hook):
    names = inspect.signature(type(hook).__init__).parameters
    kwargs = {name: getattr(hook, name) for name in names if hasattr(hook, name)}
    return getattr(accelerate.hooks, type(hook).__name__)(**kwargs)


def main(folder):
    torch.manual_seed(53)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    plain = model(x).sum().item()
    add_hook_to_module(model[0], AlignDevicesHook(execution_device="cpu", io_same_device=True))
    add_hook_to_module(model[2], Scale())
    hooked = model(x).sum().item()
    layer, old = model[0], model[0]._hf_hook
    hooks.remove_hook_from_module(layer)
    model[0] = LoraLinear(layer)
    add_hook_to_module(model[0].base_layer, recreate(old))
    with_adapter = model(x).sum().item()
    add_hook_to_module(model[2], Scale(), append=True)
    both = isinstance(model[2]._hf_hook, SequentialHook)
    twice = model(x).sum().item()
    hooks.remove_hook_from_submodules(model)
    left = [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")]
    return {
        "plain": plain,
        "hooked": hooked,
        "with_adapter": with_adapter,
        "sequential": both,
        "twice": twice,
        "left": left,
        "removed": model(x).sum().item(),
        "tensors": {name: list(value.shape) for name, value in named_module_tensors(model[0], recurse=True)},
        "devices": [is_npu_available(), is_xpu_available(), is_bf16_available()],
    }
