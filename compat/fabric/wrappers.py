"""Wrappers of models and dataloaders that `Fabric` returns, and the ``trainer`` of a task in its loop."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from numbers import Number
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from ...common.messages import name_type, nearest
from ...engine import Accelerator, move_data_to_device
from ...engine.data import shards_itself
from ...engine.optim import PreparedOptimizer
from ...strategies import World, apply_nested, cast_floating

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class FabricModule(nn.Module):
    """Model whose ``forward`` runs with the precision and the strategy of a `Fabric`.

    It has the attributes of the user's model. Mark a method that calls layers with `mark_forward_method`, unless it is
    ``forward`` or a step, such as ``training_step``.

    Args:
        forward_module: The prepared model.
        original_module: The user's model.
        accelerator: The Accelerator that prepared ``forward_module``.
    """

    def __init__(self, forward_module: nn.Module, original_module: nn.Module, accelerator: Accelerator) -> None:
        super().__init__()
        self._forward_module = forward_module
        self._original_module = original_module
        self._accelerator = accelerator
        self._forward_methods = set(_STEPS)
        self._is_complete = True

    @property
    def device(self) -> torch.device:
        """Device of the first parameter; the Fabric's device if the model has no parameters."""
        return next((parameter.device for parameter in self.parameters()), self._accelerator.device)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first floating-point parameter; torch's default dtype if there is none."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def module(self) -> nn.Module:
        """The user's model."""
        return self._original_module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's ``forward`` with the precision and the strategy of the `Fabric`.

        Unless the precision is ``"32-true"``, floating-point inputs are cast to the dtype in which the model computes,
        and outputs to torch's default dtype.
        """
        return self._run(self._forward_module, args, kwargs)

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        precision = self._accelerator.precision
        context, computed = precision.context(self._accelerator.device), precision.compute or precision.storage
        if context is None or computed is None:
            return function(*args, **kwargs)
        args, kwargs = cast_floating((args, kwargs), computed)
        with context:
            output = function(*args, **kwargs)
        return cast_floating(output, torch.get_default_dtype())

    def mark_forward_method(self, method: MethodType | str) -> None:
        """Make calls of a method, or of the method with this name, run with the strategy and the precision."""
        if not isinstance(method, MethodType | str):
            raise TypeError(
                f"mark_forward_method takes a method or its name, not {name_type(method)}. Pass the method's name."
            )
        name = method if isinstance(method, str) else method.__name__
        if name == "forward":
            raise ValueError(
                "mark_forward_method('forward') is not needed, because calling the model runs forward. Remove the call."
            )
        if not inspect.ismethod(getattr(self._original_module, name, None)):
            similar = nearest(name, dir(type(self._original_module)))
            raise AttributeError(f"{type(self._original_module).__name__} has no method {name!r} to mark.{similar}")
        self._forward_methods.add(name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the user's model, without prefixes of wrappers."""
        return self._original_module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict into the user's model."""
        return self._original_module.load_state_dict(state_dict, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("_forward_module", "_original_module"):
                raise  # it is being constructed or copied
        original = self._original_module
        attribute = getattr(original, name)
        if not inspect.ismethod(attribute) or self._forward_module is original:
            return attribute
        if name in self._forward_methods:
            method = self._accelerator.method(self._forward_module, name)
            return lambda *args, **kwargs: self._run(method, args, kwargs)
        return _refuse_forward(original, name, attribute)

    def __setattr__(self, name: str, value: Any) -> None:
        # An attribute that a script sets on the returned model is meant for the user's model, which reads it.
        own = not self.__dict__.get("_is_complete") or name in self.__dict__ or name in self._modules
        if own or name == "training":
            super().__setattr__(name, value)
        else:
            setattr(self._original_module, name, value)


def _refuse_forward(module: nn.Module, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that calling a layer raises an error."""

    def refuse(*_: Any) -> None:
        raise RuntimeError(
            f"{type(module).__name__}.{name}() calls layers, but is not marked as a forward method, so it would bypass "
            f"the strategy. Call model.mark_forward_method({name!r}) after fabric.setup()."
        )

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        handles = [part.register_forward_pre_hook(refuse) for part in module.modules()]
        try:
            return method(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()

    return call


class FabricDataLoader:
    """Dataloader that `Fabric.setup_dataloaders` returns, with the attributes of the user's dataloader.

    Args:
        loader: The user's dataloader, which is not changed.
        world: The ranks among which samples are distributed.
        device: Device to which batches are moved; None to leave them in place.
        shared: Whether to distribute samples among the ranks; see `Fabric.setup_dataloaders`.
    """

    def __init__(self, loader: Any, world: World, device: torch.device | None, shared: bool) -> None:
        if isinstance(loader, FabricDataLoader):
            raise ValueError("this DataLoader is already set up. Set up each DataLoader only once.")
        if not isinstance(loader, DataLoader):
            fix = "Pass a torch.utils.data.DataLoader."
            if isinstance(loader, list | tuple):
                fix = "Pass its items as separate arguments: setup_dataloaders(*loaders)."
            raise TypeError(f"setup_dataloaders takes DataLoaders, not {name_type(loader)}. {fix}")
        is_stream = isinstance(loader.dataset, IterableDataset)
        if shared and world.size > 1 and not is_stream and not shards_itself(loader):
            loader = _share(loader, world)
        self._dataloader = loader
        self._device = device
        self._epochs = 0

    @property
    def device(self) -> torch.device | None:
        """Device to which batches are moved, or None."""
        return self._device

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Iterator[Any]:
        loader = self._dataloader
        for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
            set_epoch = getattr(sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self._epochs)
        self._epochs += 1
        if self._device is None or self._device.type == "cpu":
            yield from loader
        else:
            for batch in loader:
                yield move_data_to_device(batch, self._device)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataloader":
            raise AttributeError(name)  # it is being copied
        return getattr(self._dataloader, name)


class _SharedSampler(DistributedSampler[Any]):
    def __iter__(self) -> Iterator[Any]:
        sampler: Any = self.dataset
        yielded = list(sampler)  # the samples that the user's sampler yields in this epoch
        return (yielded[index] for index in super().__iter__())


def _share(loader: DataLoader[Any], world: World) -> DataLoader[Any]:
    if loader.batch_sampler is not None and not hasattr(loader.batch_sampler, "sampler"):
        raise TypeError(
            f"{type(loader.batch_sampler).__name__} has no attribute 'sampler' to shard. Make it yield only this "
            "rank's batches, and pass use_distributed_sampler=False to setup_dataloaders."
        )
    inner: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler.sampler
    options = {
        "num_replicas": world.size,
        "rank": world.rank,
        "shuffle": isinstance(inner, RandomSampler),
        "seed": world.broadcast(_find_seed()),
    }
    sampler: Sampler[Any]
    if isinstance(inner, RandomSampler | SequentialSampler):
        sampler = DistributedSampler(loader.dataset, **options)
    else:
        sampler = _SharedSampler(inner, **options)
    shared = copy.copy(loader)
    # Not with setattr: a DataLoader refuses to change these after its construction.
    shared.__dict__["sampler"] = sampler
    if loader.batch_sampler is not None:
        batch_sampler: Any = copy.copy(loader.batch_sampler)
        batch_sampler.sampler = sampler
        shared.__dict__["batch_sampler"] = batch_sampler
    return shared


def _find_seed() -> int:
    seed = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))
    return seed if seed < 2**32 else 0  # torch's own initial seed is larger


def is_wrapped(obj: object) -> bool:
    """Return whether an object is a model or dataloader that a `Fabric` has set up, or a prepared optimizer."""
    return isinstance(getattr(obj, "_orig_mod", obj), FabricModule | PreparedOptimizer | FabricDataLoader)


def unwrap(obj: Any) -> Any:
    """Return the original of a model, optimizer or dataloader that `Fabric` returned, and of a compiled module."""
    obj = getattr(obj, "_orig_mod", obj)
    if isinstance(obj, FabricModule):
        return obj._original_module
    if isinstance(obj, PreparedOptimizer):
        return obj.optimizer
    return obj._dataloader if isinstance(obj, FabricDataLoader) else obj


class TaskTrainer:
    """The ``trainer`` of a `TaskModule` in a Fabric's loop. It has the Fabric's attributes.

    Args:
        fabric: The Fabric.
        optimizers: The task's prepared optimizers.
    """

    current_epoch = global_step = 0
    lr_scheduler_configs: Sequence[Any] = ()

    def __init__(self, fabric: Any, optimizers: Sequence[PreparedOptimizer]) -> None:
        self.fabric = fabric
        self.optimizers = list(optimizers)

    @property
    def accelerator(self) -> Any:
        """The Fabric's Accelerator, with the task's optimizers."""
        return _WithOptimizers(self.fabric.accelerator, self.optimizers)

    @property
    def steps(self) -> Any:
        """The Fabric, whose `backward` the task's ``manual_backward`` calls."""
        return self.fabric

    def log_dict(self, values: Mapping[str, Any], logger: bool | None) -> None:
        """Send the values that a task logs to the Fabric's loggers, unless ``logger`` is False.

        Raises:
            ValueError: If a value is neither a number nor a tensor.
        """
        if logger is False:
            return
        for name, value in values.items():
            if not isinstance(value, Number | Tensor):
                raise ValueError(
                    f"self.log({name!r}) got {name_type(value)}, but a task in a Fabric's loop can log only numbers "
                    "and tensors. Pass the number, for example metric.compute()."
                )
        self.fabric.log_dict(values)

    def __getattr__(self, name: str) -> Any:
        if name == "fabric":
            raise AttributeError(name)  # it is being copied
        try:
            return getattr(self.fabric, name)
        except AttributeError as error:
            raise AttributeError(
                f"self.trainer has no attribute {name!r} in a Fabric's loop, because there is no Trainer. Pass the "
                "value to the task's method."
            ) from error


class _WithOptimizers:
    def __init__(self, accelerator: Accelerator, optimizers: list[PreparedOptimizer]) -> None:
        self._accelerator = accelerator
        self.optimizers = optimizers

    def __getattr__(self, name: str) -> Any:
        if name == "_accelerator":
            raise AttributeError(name)  # it is being copied
        return getattr(self._accelerator, name)


# -- private names of Lightning's that public programs import ------------------------------------------------------

_FabricModule, _FabricDataLoader, _FabricOptimizer = FabricModule, FabricDataLoader, PreparedOptimizer


def _unwrap_objects(collection: Any) -> Any:
    """Return nested data with `unwrap` applied to each model, optimizer and dataloader."""
    return apply_nested(collection, (nn.Module, PreparedOptimizer, FabricDataLoader), unwrap)
