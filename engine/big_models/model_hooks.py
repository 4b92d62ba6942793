"""Hooks that wrap a module's ``forward``, with the interface of Accelerate's hooks."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from .hooks import move
from .memory import Device, accelerators, resolve

# Methods that the dispatch of other libraries sets on a model.
_WARNING_METHODS = ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa")


class ModelHook:
    """Base class of hooks that run before and after a module's forward; see `add_hook_to_module`.

    A `ModelHook` also runs in a direct call of ``module.forward(...)``, where torch's forward hooks do not run.

    Attributes:
        no_grad: Run ``forward`` under ``torch.no_grad()``.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare a module when the hook is added to it.

        Args:
            module: The module that the hook is added to.

        Returns:
            The module.
        """
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Return the arguments to pass to the module's ``forward``.

        Args:
            module: The module that is called.
            args: The caller's arguments.
            kwargs: The caller's keyword arguments.
        """
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return the output for the caller.

        Args:
            module: The module that was called.
            output: The return value of ``forward``.
        """
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Restore a module when the hook is removed from it.

        Args:
            module: The module that the hook is removed from.

        Returns:
            The module.
        """
        return module


class SequentialHook(ModelHook):
    """Hook that runs several hooks one after the other. Gradients are disabled if one of the hooks disables them.

    Args:
        hooks: The hooks, in the order in which they run.
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks
        self.no_grad = any(hook.no_grad for hook in hooks)

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare the module with each hook in turn.

        Args:
            module: The module that the hook is added to.
        """
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Pass the arguments through each hook in turn.

        Args:
            module: The module that is called.
            args: The caller's arguments.
            kwargs: The caller's keyword arguments.
        """
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Pass the output through each hook in turn.

        Args:
            module: The module that was called.
            output: The return value of ``forward``.
        """
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Restore the module with each hook in turn.

        Args:
            module: The module that the hook is removed from.
        """
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Add a hook that runs before and after each forward pass of a module until `remove_hook_from_module` is called.

    Args:
        module: The module; it is changed in place.
        hook: The `ModelHook` to run.
        append: Run the hook after the module's existing hook. Default: replace it without detaching it.

    Returns:
        The module.
    """
    current = getattr(module, "_hf_hook", None)
    if append and current is not None:
        remove_hook_from_module(module)
        hook = SequentialHook(current, hook)
    if not hasattr(module, "_old_forward"):
        module._old_forward = module.forward  # type: ignore[assignment]
    module = hook.init_hook(module)
    module._hf_hook = hook  # type: ignore[assignment]
    forward = functools.update_wrapper(functools.partial(_forward, module), module._old_forward)  # type: ignore[arg-type]
    setattr(_get_forward_owner(module), "forward", forward)  # noqa: B010 - an assignment would be to a method
    return module


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    hook = module._hf_hook
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    if hook.no_grad:
        with torch.no_grad():
            output = module._old_forward(*args, **kwargs)
    else:
        output = module._old_forward(*args, **kwargs)
    return hook.post_forward(module, output)


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove a module's `ModelHook` and restore the module's own ``forward``.

    Methods such as ``to`` that another library's dispatch has set on the module are removed too.

    Args:
        module: The module; it is changed in place.
        recurse: Remove the hooks of the modules inside it too.

    Returns:
        The module.
    """
    hook = module.__dict__.pop("_hf_hook", None)
    if hook is not None:
        hook.detach_hook(module)
    old_forward = module.__dict__.pop("_old_forward", None)
    if old_forward is not None:
        owner: Any = _get_forward_owner(module)
        if owner is module and getattr(old_forward, "__func__", None) is getattr(type(module), "forward", None):
            # Then the class's own method is used, and the module needs no copy of it.
            owner.__dict__.pop("forward", None)
        else:
            owner.forward = old_forward
    for name in _WARNING_METHODS:
        module.__dict__.pop(name, None)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse=True)
    return module


def _get_forward_owner(module: nn.Module) -> Any:
    # A traced module writes its code into its class, whose only instance it is. A forward of its own would hide code
    # that is traced later.
    return type(module) if "GraphModuleImpl" in str(type(module)) else module


class CpuOffload(ModelHook):
    """Hook that keeps a whole model on the CPU until its forward pass; see `cpu_offload_with_hook`.

    Args:
        execution_device: The device that runs the model. Default: the first accelerator, else the CPU.
        prev_module_hook: The hook of the model that is first moved off the device.

    Raises:
        ValueError: If ``execution_device`` is invalid or not on this machine.
    """

    def __init__(
        self, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        if execution_device is None:
            execution_device = 0 if accelerators()[1] else "cpu"
        self.execution_device = resolve(execution_device, f"execution_device={execution_device!r}")
        self.prev_module_hook = prev_module_hook

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the model to the CPU.

        Args:
            module: The model.
        """
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Move the previous model, if any, to the CPU, and then this model and its inputs to the device.

        Args:
            module: The model.
            args: The caller's arguments.
            kwargs: The caller's keyword arguments.
        """
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
        module.to(self.execution_device)
        return move(args, self.execution_device, ()), move(kwargs, self.execution_device, ())


class UserCpuOffloadHook:
    """Handle to offload a model after use, or to remove its hook. Returned by `cpu_offload_with_hook`.

    Args:
        model: The model that the hook is added to.
        hook: The `CpuOffload` that was added to the model.
    """

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model, self.hook = model, hook

    def offload(self) -> None:
        """Move the model to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook, and any other `ModelHook` of the model, without moving the model."""
        remove_hook_from_module(self.model)
