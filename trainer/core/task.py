"""`TaskModule`: a model with its training and evaluation steps and its optimizers."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ...common.messages import warn
from ...engine import collectives
from ...engine.metrics import Metrics
from ...strategies import apply_nested
from .export import Exports
from .gradient_clipping import check_clip_algorithm, split_by_limit
from .hooks import TaskHooks
from .hparams import HyperparametersMixin

if TYPE_CHECKING:
    from ..trainer import Trainer


class TaskModule(HyperparametersMixin, TaskHooks, Exports, nn.Module):
    """Model that defines its training and evaluation steps and its optimizers.

    Override ``training_step`` and ``configure_optimizers``, then pass the task to ``Trainer.fit``.

    Attributes:
        automatic_optimization: Whether the Trainer runs the backward pass and steps the optimizers. Default: True.
        strict_loading: Whether a checkpoint's weights must match the task's in name and shape. Default: True.
        example_input_array: Example input of ``forward`` for the model summary, graph logging and export. Default:
            None.

    Examples:
        >>> import torch
        >>> import treadle as tl
        >>> class Line(tl.TaskModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(1, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         loss = (self.layer(batch) - 2 * batch).square().mean()
        ...         self.log("train_loss", loss)
        ...         return loss
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.01)
        >>> data = torch.utils.data.DataLoader(torch.arange(8.0).reshape(8, 1), batch_size=4)
        >>> trainer = tl.Trainer(max_epochs=2, accelerator="cpu", devices=1, barebones=True)
        >>> trainer.fit(Line(), data)
        >>> trainer.global_step
        4
    """

    automatic_optimization: bool = True
    strict_loading: bool = True
    example_input_array: Any = None
    _trainer: Trainer | None
    _metrics: Metrics | None
    _toggled: list[nn.Parameter]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Plain attributes, so that nn.Module does not register the Trainer's modules and reads are fast.
        self.__dict__["_trainer"] = None
        self.__dict__["_metrics"] = None
        self.__dict__["_toggled"] = []

    # -- methods to define ---------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor | Mapping[str, Any]:
        """Return the mean loss of a batch, or a dict with the loss under ``"loss"``.

        If the loss is averaged over items other than the batch's samples, such as tokens, return their number under
        ``"weight"``. The gradient of the optimizer step is then the mean over the items of all its micro-batches on all
        processes. Manual optimization ignores ``"weight"``.

        Args:
            args: The batch and its index ``batch_idx``. The signature may omit ``batch_idx``.
            kwargs: Not used by the Trainer.

        Returns:
            The loss as a tensor with one element, or a dict with this tensor under ``"loss"``. If
            ``automatic_optimization`` is False, any value is allowed.
        """
        raise NotImplementedError

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Process one validation batch and log its metrics.

        Args:
            args: The batch, ``batch_idx`` and ``dataloader_idx``. With a single dataloader, the signature may omit
                ``dataloader_idx`` or both indices.
            kwargs: Not used by the Trainer.

        Returns:
            Any value; ``on_validation_batch_end`` receives it as ``outputs``.
        """
        raise NotImplementedError

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Process one test batch and log its metrics.

        Args:
            args: See `validation_step`.
            kwargs: Not used by the Trainer.

        Returns:
            Any value; ``on_test_batch_end`` receives it as ``outputs``.
        """
        raise NotImplementedError

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the predictions for one batch. Default: ``self(batch)``.

        Args:
            args: See `validation_step`.
            kwargs: Not used by the Trainer.
        """
        return self(args[0])

    def configure_optimizers(self) -> Any:
        """Return the optimizers and, optionally, learning rate schedulers, in any form that Lightning accepts.

        Several optimizers step together after the backward pass of one loss. Optimizers that take turns, as in a GAN,
        need ``automatic_optimization = False``.

        Returns:
            An optimizer; a list of optimizers; two lists (optimizers, schedulers); a dict with ``"optimizer"`` and
            optionally ``"lr_scheduler"``; a list of such dicts; or None to train without an optimizer. A scheduler is
            an object with ``step`` and ``state_dict``, or a dict whose keys are attributes of ``SchedulerConfig``.
        """
        raise NotImplementedError

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | Mapping[str, float] | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients before an optimizer step. Default: call `clip_gradients` with these arguments.

        With several optimizers, the default clips all gradients by one norm. An override is called for each optimizer.

        Args:
            optimizer: Optimizer whose gradients are clipped.
            gradient_clip_val: Value of the Trainer's flag with the same name.
            gradient_clip_algorithm: Value of the Trainer's flag with the same name.
        """
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def clip_gradients(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        gradient_clip_val: float | Mapping[str, float] | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of an optimizer's parameters.

        Args:
            optimizer: Optimizer whose gradients are clipped, or a list of optimizers to clip by one norm.
            gradient_clip_val: Maximum total norm of the gradients, or maximum absolute value of their elements. A dict
                has a limit for each part of the task; see `Trainer`. None or 0 disables clipping. Default: None.
            gradient_clip_algorithm: ``"norm"`` or ``"value"``. Default: ``"norm"``.

        Raises:
            RuntimeError: If clipping is enabled and the task has no Trainer.
            ValueError: If clipping is enabled and the algorithm is unknown.
        """
        if not gradient_clip_val:
            return
        algorithm = check_clip_algorithm(gradient_clip_algorithm)
        accelerator, parameters = self.trainer.accelerator, list[Tensor]()
        for one in (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else optimizer:
            parameters += [p for group in one.param_groups for p in group["params"]]
            accelerator.unscale_gradients(one)
        clip: Any = accelerator.strategy.clip_grad_norm_
        if algorithm == "value":
            clip = accelerator.strategy.clip_grad_value_
        if not isinstance(gradient_clip_val, Mapping):
            clip(parameters, gradient_clip_val)
            return
        for limit, chosen in split_by_limit(self, parameters, gradient_clip_val):
            clip(chosen, limit)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass. ``loss`` is already scaled for accumulation, world size and the gradient scaler.

        Args:
            loss: The scaled loss, a tensor with one element.
            args: Positional arguments of ``Tensor.backward``.
            kwargs: Keyword arguments of ``Tensor.backward``.
        """
        if self.fabric is None:
            loss.backward(*args, **kwargs)
        else:
            self.fabric.backward(loss, *args, **kwargs)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: torch.optim.Optimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Step an optimizer. Default: call ``optimizer.step(closure=optimizer_closure)``.

        With several optimizers, it is called for each, after the backward pass for all of them. An override that does
        not call ``optimizer.step`` skips the step.

        Args:
            epoch: Number of completed epochs.
            batch_idx: Index of the step's last micro-batch.
            optimizer: Optimizer to step. Its gradients are already computed, unless it needs a closure.
            optimizer_closure: Function that returns the detached loss of the last micro-batch. If the optimizer needs a
                closure, as L-BFGS does, the function instead recomputes the gradients of the step and returns the mean
                loss over its micro-batches and all processes.
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """Reset an optimizer's gradients.

        Args:
            epoch: Number of completed epochs.
            batch_idx: Index of the step's last micro-batch, or of its first one if the optimizer needs a closure.
            optimizer: Optimizer whose gradients are reset.
        """
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Step a scheduler that is due.

        Args:
            scheduler: Scheduler to step.
            metric: Monitored value for a plateau scheduler; None for other schedulers.
        """
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    # -- methods to call -----------------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = True,
        sync_dist_group: Any | None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log one value. All processes must log the same names in the same order.

        Args:
            name: Name under which the value is logged.
            value: A number, a tensor with one element, or a ``torchmetrics.Metric``.
            prog_bar: Show the value in the progress bar. Default: False.
            logger: Send the value to the loggers. Default: True.
            on_step: Log the value of each step. Default: True during training batches.
            on_epoch: Log the value reduced over the epoch. Default: True outside of training batches.
            reduce_fx: Reduction over the batches of an epoch and over all processes: ``"mean"``, ``"sum"``, ``"min"``,
                ``"max"``, or a function with one of these names, such as ``torch.mean``. Default: ``"mean"``.
            enable_graph: Ignored; values are always detached.
            sync_dist: Ignored; Treadle reduces logged values over all processes.
            sync_dist_group: Ignored.
            add_dataloader_idx: Append ``/dataloader_idx_N`` to the name if there are several evaluation dataloaders.
                Default: True.
            batch_size: Weight of the value in a mean over batches or processes. Default: the number of samples in the
                batch, or 1 outside of batches.
            metric_attribute: Ignored.
            rank_zero_only: Ignored.

        Raises:
            TypeError, ValueError: If an argument is invalid, or contradicts another argument or an earlier call.
        """
        if is_dynamo_compiling():  # in a step compiled by the user: called between two graphs
            log_arguments = (name, value, prog_bar, logger, on_step, on_epoch, reduce_fx)
            _log_outside(self, *log_arguments, batch_size=batch_size, add_dataloader_idx=add_dataloader_idx)
            return
        metrics = self._metrics
        if metrics is None and self.fabric is not None:
            self._trainer.log_dict({name: value}, logger)  # type: ignore[union-attr]
            return
        if metrics is None:
            warn(
                f"self.log({name!r}) has no effect here. Call it in a step, or in a hook between the start of a stage "
                "(on_*_start) and the end of an epoch (on_*_epoch_end)."
            )
            return
        metrics.log(name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, batch_size, add_dataloader_idx)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log every item of a mapping or ``torchmetrics.MetricCollection`` with the same arguments.

        Args:
            dictionary: Values by name.
            args: Positional arguments of `log` after the value.
            kwargs: Keyword arguments of `log`.
        """
        if self._metrics is None and self.fabric is not None:
            self._trainer.log_dict(dictionary, kwargs.get("logger"))  # type: ignore[union-attr]
            return
        # By default, items() of a MetricCollection copies shared states, such as all predictions of an epoch.
        shared = {"copy_state": False} if isinstance(getattr(dictionary, "compute_groups", None), dict) else {}
        for name, value in dictionary.items(**shared):
            self.log(name, value, *args, **kwargs)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank zero, without disturbing the progress bar. Without a Trainer, every process prints.

        Args:
            args: Positional arguments of ``print``.
            kwargs: Keyword arguments of ``print``.
        """
        if self._trainer is None:
            print(*args, **kwargs)
        else:
            self._trainer.print(*args, **kwargs)

    def all_gather(self, data: Any, group: Any | None = None, sync_grads: bool = False) -> Any:
        """Return the tensors of all processes, stacked along a new first dimension.

        With a single process, no dimension is added.

        Args:
            data: Tensors or numbers, optionally nested in dicts, lists and tuples. Their shapes and dtypes must be the
                same on all processes.
            group: A torch process group to gather from. Default: all processes.
            sync_grads: Let gradients flow back to the process that each tensor came from; see `Accelerator.gather`.
                Default: False.

        Raises:
            ValueError: If the number, shapes or dtypes of the tensors differ between processes, or this process is not
                in ``group``.
            RuntimeError: If the task has no Trainer.
        """
        world = self.trainer.accelerator.world
        if group is not None and world.size > 1:
            world = world.of_group(group)
        data = apply_nested(data, (bool, int, float), lambda number: torch.tensor(number, device=self.device))
        return collectives.all_gather(data, world, sync_grads)

    def freeze(self) -> Self:
        """Set ``requires_grad`` of every parameter to False and switch to evaluation mode. Returns the task."""
        for parameter in self.parameters():
            parameter.requires_grad = False
        return self.eval()

    def unfreeze(self) -> Self:
        """Set ``requires_grad`` of every parameter to True and switch to training mode. Returns the task."""
        for parameter in self.parameters():
            parameter.requires_grad = True
        return self.train()

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Scale the loss, for example for mixed float16 precision, and run the backward pass.

        Call this method in ``training_step`` instead of ``loss.backward()``. Requires ``automatic_optimization=False``.

        Args:
            loss: 0-d tensor, the mean over the batch's samples.
            args: Positional arguments of ``Tensor.backward``.
            kwargs: Keyword arguments of ``Tensor.backward``.

        Raises:
            RuntimeError: If no ``fit`` is running, or ``automatic_optimization`` is True.
        """
        if self.trainer.steps is None:
            raise RuntimeError("manual_backward was called, but no fit is running. Call it in training_step.")
        self.trainer.steps.backward(loss, *args, **kwargs)

    @contextmanager
    def toggled_optimizer(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Disable gradients of parameters that belong only to other optimizers, for the duration of a ``with`` block.

        Args:
            optimizer: Optimizer whose parameters are not affected.

        Raises:
            RuntimeError: See `toggle_optimizer`.
        """
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def toggle_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Disable gradients of parameters that belong only to other optimizers, until `untoggle_optimizer` is called.

        Args:
            optimizer: Optimizer whose parameters are not affected.

        Raises:
            RuntimeError: If gradients are still disabled by an earlier call, if automatic optimization steps several
                optimizers together, or if the task has no Trainer.
        """
        if self.automatic_optimization and self.fabric is None and len(self.trainer.optimizers) > 1:
            raise RuntimeError(
                "toggle_optimizer is for optimizers that take turns, but with automatic_optimization=True, all "
                f"{len(self.trainer.optimizers)} optimizers step together. Set self.automatic_optimization = False in "
                "__init__, and step them in training_step, or remove the call."
            )
        parameter_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if self._toggled:
            raise RuntimeError("toggle_optimizer was called twice. Call untoggle_optimizer before the second call.")
        for other in self.trainer.optimizers:
            for parameter in (p for group in other.param_groups for p in group["params"]):
                if id(parameter) not in parameter_ids and parameter.requires_grad:
                    parameter.requires_grad = False
                    self._toggled.append(parameter)

    def untoggle_optimizer(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Re-enable the gradients that `toggle_optimizer` disabled.

        Args:
            optimizer: Ignored.
        """
        for parameter in self._toggled:
            parameter.requires_grad = True
        self._toggled.clear()

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer if there is only one, otherwise the list of all optimizers.

        While a task without an optimizer is trained, this returns an optimizer whose steps change nothing.

        Args:
            use_pl_optimizer: Return the optimizers wrapped by the Trainer. False returns them unwrapped. Default: True.
        """
        prepared = self.trainer.accelerator.optimizers or getattr(self.trainer.steps, "idle", [])
        chosen = [o if use_pl_optimizer else o.optimizer for o in prepared]
        return chosen[0] if len(chosen) == 1 else chosen

    def lr_schedulers(self) -> Any:
        """Return the scheduler, a list if there are several schedulers, or None if there are none."""
        chosen = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return chosen[0] if len(chosen) == 1 else chosen or None

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | os.PathLike[str] | IO[bytes],
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        *,
        sha256: str | None = None,
        **kwargs: Any,
    ) -> Self:
        """Build a task from the hyperparameters in a checkpoint, load the checkpoint's weights, and return the task.

        Args:
            checkpoint_path: Treadle checkpoint, Lightning ``.ckpt``, or another source of weights that `load_weights`
                accepts.
            map_location: Device of the task; see `load_checkpoint`. Default: the CPU.
            hparams_file: Path of a YAML file of hyperparameters, such as a logger's ``hparams.yaml``. These
                hyperparameters replace the saved ones.
            strict: Require the checkpoint's weights to match the task's in name and shape. Default: the task's
                ``strict_loading``.
            weights_only: Ignored; code stored in a checkpoint is never executed.
            sha256: Expected SHA-256 digest of the file. Without it, a download only warns with its digest.
            kwargs: Arguments of ``__init__``, which override the saved ones.

        Raises:
            TypeError: If an argument has the wrong type, or a required argument of ``__init__`` is missing.
            ValueError: If an argument is invalid, or the checkpoint cannot be loaded.
            OSError: If a download fails, or a file cannot be opened.
        """
        from .loading import build, warn_of_code

        warn_of_code(weights_only)
        return build(cls, checkpoint_path, map_location, hparams_file, strict, sha256, kwargs)

    # -- values of the Trainer -----------------------------------------------------------------------------------

    @property
    def device_mesh(self) -> Any:
        """Torch ``DeviceMesh`` of the strategy; None if the strategy has none or there is no Trainer."""
        return None if self._trainer is None else self._trainer.accelerator.strategy.device_mesh

    @property
    def trainer(self) -> Trainer:
        """Trainer that runs this task. Reading it raises a RuntimeError if there is none."""
        if self._trainer is None:
            raise RuntimeError(
                f"{type(self).__name__} is not attached to a Trainer. Read self.trainer after fit, validate, test or "
                "predict has been called."
            )
        return self._trainer

    @trainer.setter
    def trainer(self, value: Trainer | None) -> None:
        for task in task_modules(self):
            task.__dict__["_trainer"] = value

    @property
    def fabric(self) -> Any:
        """The `Fabric` in whose loop the task runs, or None. Setting it connects the task and its nested tasks."""
        return getattr(self._trainer, "fabric", None)

    @fabric.setter
    def fabric(self, value: Any) -> None:
        self.trainer = None if value is None else value.make_task_trainer()

    @property
    def device(self) -> torch.device:
        """Device of the first parameter, or of the first buffer if the task has no parameters.

        Without either, this is the Trainer's device, or the CPU if there is no Trainer.
        """
        if (first := next(itertools.chain(self.parameters(), self.buffers()), None)) is not None:
            return first.device
        return torch.device("cpu") if self._trainer is None else self._trainer.accelerator.device

    @property
    def on_gpu(self) -> bool:
        """True if `device` is a CUDA device."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first floating-point parameter; torch's default dtype if there is none."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def current_epoch(self) -> int:
        """Value of `Trainer.current_epoch`; 0 without a Trainer."""
        return 0 if self._trainer is None else self._trainer.current_epoch

    @property
    def global_step(self) -> int:
        """Value of `Trainer.global_step`; 0 without a Trainer."""
        return 0 if self._trainer is None else self._trainer.global_step

    @property
    def global_rank(self) -> int:
        """Rank of this process; 0 without a Trainer."""
        return 0 if self._trainer is None else self._trainer.global_rank

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine; 0 without a Trainer."""
        return 0 if self._trainer is None else self._trainer.local_rank

    @property
    def logger(self) -> Any:
        """First logger of the Trainer, or None."""
        return None if self._trainer is None else self._trainer.logger

    @property
    def loggers(self) -> list[Any]:
        """Loggers of the Trainer; an empty list without a Trainer."""
        return [] if self._trainer is None else self._trainer.loggers

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state["_trainer"] = state["_metrics"] = None
        state["_toggled"] = []
        state.pop("_compiler", None)
        state.pop("_added_objects", None)
        return state


# TorchScript would compile a task's properties and annotated attributes; forward needs none of them.
_OWN_BASES = [kind for kind in TaskModule.__mro__ if kind not in (nn.Module, object)]
_PROPERTIES = [name for kind in _OWN_BASES for name, value in vars(kind).items() if isinstance(value, property)]
TaskModule.__jit_unused_properties__ = _PROPERTIES  # type: ignore[attr-defined]
TaskModule.__jit_ignored_attributes__ = [  # type: ignore[attr-defined]
    *_PROPERTIES,
    *(name for kind in _OWN_BASES for name in inspect.get_annotations(kind)),
]


def task_modules(task: TaskModule) -> list[TaskModule]:
    """Return the task itself and its nested TaskModules, at any depth."""
    return [part for part in task.modules() if isinstance(part, TaskModule)]


def has_own(owner: object, name: str, base: type) -> bool:
    """Return whether an object or its class overrides a method of ``base``. A method set to None does not count."""
    method = getattr(owner, name)
    return method is not None and getattr(method, "__func__", method) is not getattr(base, name)


def overrides(task: TaskModule, name: str) -> bool:
    """Return whether a task overrides the method ``name``. A method set to None does not count.

    Args:
        task: Task to check.
        name: Name of the method.
    """
    return has_own(task, name, TaskModule)


def log_to(task: TaskModule, metrics: Metrics | None) -> None:
    """Set the destination of the values that the task and its nested tasks log.

    Args:
        task: Outermost task.
        metrics: Destination; None if no values can be logged.
    """
    for part in task_modules(task):
        part.__dict__["_metrics"] = metrics  # nn.Module.__setattr__ would be slow and might register it


@torch._disable_dynamo  # the public `torch.compiler.disable` would import the compiler here, which takes a second
def _log_outside(task: TaskModule, *args: Any, **kwargs: Any) -> None:
    task.log(*args, **kwargs)
