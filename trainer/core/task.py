"""`TaskModule`: a model, the steps it is trained and evaluated by, and its optimizers."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ...common.messages import warn
from ...common.validation import choose
from ...engine import collectives
from ...engine.metrics import Metrics
from .datamodule import TransferHooks
from .export import Exports
from .hooks import TaskHooks
from .hparams import HyperparametersMixin

if TYPE_CHECKING:
    from ..trainer import Trainer


class TaskModule(HyperparametersMixin, TransferHooks, TaskHooks, Exports, nn.Module):
    """An ``nn.Module`` with steps. Write ``training_step`` and ``configure_optimizers``, call ``Trainer.fit``.

    The names are the ones Lightning's users know. A task knows nothing of processes.

    Attributes:
        automatic_optimization: Whether the Trainer runs backward and the optimizer.
        strict_loading: Whether checkpoints must hold exactly this task's weights.
        example_input_array: An input for graph logging and export, if you like.
    """

    automatic_optimization: bool = True
    strict_loading: bool = True
    example_input_array: Any = None
    _trainer: Trainer | None
    _metrics: Metrics | None
    _toggled: list[nn.Parameter]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Plain attributes: nn.Module must not register the Trainer's parts, and reading them must cost nothing.
        self.__dict__["_trainer"] = None
        self.__dict__["_metrics"] = None
        self.__dict__["_toggled"] = []

    # -- what you write ------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor | Mapping[str, Any]:
        """Return the mean loss of a batch, or a dict with ``"loss"``.

        A dict may also hold ``"weight"``: what the loss is a mean over where that is not the batch's samples (tokens,
        say). Then the optimizer step's gradient is the mean over all of these, on all processes.
        """
        raise NotImplementedError

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Work on one validation batch; log what you measure."""
        raise NotImplementedError

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Work on one test batch; log what you measure."""
        raise NotImplementedError

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the predictions for one batch; by default ``self(batch)``."""
        return self(args[0])

    def configure_optimizers(self) -> Any:
        """Return the optimizer, with schedulers if you like: every form that Lightning takes."""
        raise NotImplementedError

    def train_dataloader(self) -> Any:
        """Return the training loader, if it is not passed to ``fit``."""
        raise NotImplementedError

    def val_dataloader(self) -> Any:
        """Return the validation loader, or several."""
        raise NotImplementedError

    def test_dataloader(self) -> Any:
        """Return the test loader, or several."""
        raise NotImplementedError

    def predict_dataloader(self) -> Any:
        """Return the predict loader, or several."""
        raise NotImplementedError

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of a step; by default as the Trainer's flags say."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def clip_gradients(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of ``optimizer``'s parameters by ``"norm"`` or by ``"value"``."""
        if not gradient_clip_val:
            return
        choose("gradient_clip_algorithm", gradient_clip_algorithm or "norm", ("norm", "value"))
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        accelerator = self.trainer.accelerator
        accelerator.unscale_gradients(optimizer)
        if gradient_clip_algorithm == "value":
            accelerator.strategy.clip_grad_value_(parameters, gradient_clip_val)
        else:
            accelerator.strategy.clip_grad_norm_(parameters, gradient_clip_val)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of a loss, which is weighed and scaled as it has to be."""
        loss.backward(*args, **kwargs)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: torch.optim.Optimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Step an optimizer; by default at once. To leave a step out, don't call ``optimizer.step``.

        Args:
            epoch: Epochs completed.
            batch_idx: The group's last micro-batch.
            optimizer: The one to step, with its gradients in place, agreed on and clipped.
            optimizer_closure: Returns the step's loss. An optimizer that needs a closure (L-BFGS) gets one that
                computes loss and gradients anew.
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """Drop an optimizer's gradients, after its step."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Step a scheduler that is due; ``metric`` is the monitored value of a plateau scheduler."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    # -- what you call -------------------------------------------------------------------------------------------

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
        """Log one number. Costs next to nothing: it is reduced and read later, in bulk, over all processes.

        Args:
            name: The name to log under.
            value: A number, a tensor with one element, or a ``torchmetrics.Metric``.
            prog_bar: Show it in the progress bar.
            logger: Send it to the loggers (default yes).
            on_step: Log the value of single steps (default: in training batches).
            on_epoch: Log the epoch's value (default: everywhere else).
            reduce_fx: How an epoch's values, and the processes', become one: ``"mean"``, ``"sum"``, ``"min"``,
                ``"max"``.
            enable_graph: Accepted for Lightning's signature; values are always detached.
            sync_dist, sync_dist_group: Accepted for Lightning's signature; values are always of all processes.
            add_dataloader_idx: Add ``/dataloader_idx_N`` to the name where there are several evaluation loaders.
            batch_size: What the value weighs in an epoch's mean (default: the samples the loader put into the batch).
            metric_attribute: Accepted for Lightning's signature; metrics are not restored by attribute.
            rank_zero_only: Accepted for Lightning's signature; log the same names on every process.

        Raises:
            TypeError, ValueError: For a value that is no number, with its shape or type.
        """
        if is_dynamo_compiling():  # in a step that the user has compiled: called between two graphs
            log_arguments = (name, value, prog_bar, logger, on_step, on_epoch, reduce_fx)
            _log_outside(self, *log_arguments, batch_size=batch_size, add_dataloader_idx=add_dataloader_idx)
            return
        metrics = self._metrics
        if metrics is None:
            warn(
                f"self.log({name!r}) does nothing here: log in a step, or in a hook of a running stage from its "
                "on_*_start to its on_*_epoch_end."
            )
            return
        metrics.log(name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, batch_size, add_dataloader_idx)

    def log_dict(self, dictionary: Mapping[str, Any], **kwargs: Any) -> None:
        """`log` every item of a mapping (or ``torchmetrics.MetricCollection``) with the same arguments."""
        # By default the items() of a MetricCollection copies its common states, such as all predictions of an epoch.
        shared = {"copy_state": False} if isinstance(getattr(dictionary, "compute_groups", None), dict) else {}
        for name, value in dictionary.items(**shared):
            self.log(name, value, **kwargs)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on rank zero, beside the progress bar."""
        if self._trainer is None:
            print(*args, **kwargs)
        else:
            self._trainer.print(*args, **kwargs)

    def all_gather(self, data: Any, group: Any | None = None, sync_grads: bool = False) -> Any:
        """Stack every process's tensors along a new first dimension, if there is more than one process.

        Args:
            data: Tensors or numbers, nested in dicts, lists and tuples as you like. Shapes must be the same on all
                processes; ``self.trainer.accelerator.gather`` concatenates batches of different sizes.
            group: A process group of torch's to gather from (default: all processes).
            sync_grads: Let gradients flow back to the process that each tensor came from; see `Accelerator.gather` for
                their scale. If False, several processes get the result without gradients.

        Raises:
            ValueError: On every process, if their shapes differ.
        """
        world = self.trainer.accelerator.world
        if group is not None and world.size > 1:
            world = world.of_group(group)
        data = apply_to_collection(data, (bool, int, float), torch.tensor, device=self.device)
        return collectives.all_gather(data, world, sync_grads)

    def freeze(self) -> Self:
        """Make every parameter constant, and go to evaluation mode."""
        for parameter in self.parameters():
            parameter.requires_grad = False
        return self.eval()

    def unfreeze(self) -> Self:
        """Make every parameter trainable, and go to training mode."""
        for parameter in self.parameters():
            parameter.requires_grad = True
        return self.train()

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """In ``training_step``, with ``automatic_optimization=False``: add a loss's gradients, in the run's precision.

        Args:
            loss: 0-d tensor, the mean over the batch's samples; on several processes it is weighed by their number.
            kwargs: For ``Tensor.backward``.

        Raises:
            RuntimeError: Elsewhere.
        """
        if self.trainer.steps is None:
            raise RuntimeError("manual_backward belongs into training_step; no fit is running.")
        self.trainer.steps.backward(loss, *args, **kwargs)

    @contextmanager
    def toggled_optimizer(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """A context in which only ``optimizer``'s parameters get gradients."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def toggle_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Give gradients to no other optimizer's parameters, until `untoggle_optimizer`."""
        parameter_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if self._toggled:
            raise RuntimeError("toggle_optimizer was called before: call untoggle_optimizer first.")
        for other in self.trainer.optimizers:
            for parameter in (p for group in other.param_groups for p in group["params"]):
                if id(parameter) not in parameter_ids and parameter.requires_grad:
                    parameter.requires_grad = False
                    self._toggled.append(parameter)

    def untoggle_optimizer(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Undo `toggle_optimizer`."""
        for parameter in self._toggled:
            parameter.requires_grad = True
        self._toggled.clear()

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer, or the list of them."""
        chosen = [o if use_pl_optimizer else o.optimizer for o in self.trainer.accelerator.optimizers]
        return chosen[0] if len(chosen) == 1 else chosen

    def lr_schedulers(self) -> Any:
        """The scheduler, the list of them, or None."""
        chosen = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return chosen[0] if len(chosen) == 1 else chosen or None

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | os.PathLike[str],
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        *,
        sha256: str | None = None,
        **kwargs: Any,
    ) -> Self:
        """Build the task from the hyperparameters in a checkpoint, and load its weights. No code in it is ever run.

        Args:
            checkpoint_path: A checkpoint of ours; a Lightning ``.ckpt``, whose ``hyper_parameters`` become arguments
                as far as ``__init__`` takes them; any other source of weights that `load_weights` takes; or the URL of
                a file, with ``sha256``.
            map_location: The device to put the task on (default: the CPU).
            hparams_file: The ``hparams.yaml`` or ``.csv`` of a logger, in place of the saved hyperparameters.
            strict: Whether the weights must match exactly (default: the task's ``strict_loading``).
            weights_only: Accepted for Lightning's signature; code in a file never runs.
            sha256: The digest of the file, compared before anything in it is looked at.
            kwargs: Arguments of ``__init__``, in place of the saved ones.

        Raises:
            ValueError: If it is no checkpoint, is damaged or harmful, or the weights are another model's.
        """
        from .loading import build, warn_of_code

        warn_of_code(weights_only)
        return build(cls, checkpoint_path, map_location, hparams_file, strict, sha256, kwargs)

    # -- what the Trainer knows ----------------------------------------------------------------------------------

    @property
    def device_mesh(self) -> Any:
        """The processes on a grid (torch's ``DeviceMesh``, with ``"data_parallel"`` and the like), or None.

        None without a Trainer.
        """
        return None if self._trainer is None else self._trainer.accelerator.strategy.device_mesh

    @property
    def trainer(self) -> Trainer:
        """The Trainer that runs this task.

        Raises:
            RuntimeError: If there is none.
        """
        if self._trainer is None:
            raise RuntimeError(f"{type(self).__name__} is not attached to a Trainer: that happens in fit and its kin.")
        return self._trainer

    @trainer.setter
    def trainer(self, value: Trainer | None) -> None:
        for task in task_modules(self):
            task.__dict__["_trainer"] = value

    @property
    def device(self) -> torch.device:
        """Where the parameters are; without any, where the Trainer computes."""
        if (first := next(itertools.chain(self.parameters(), self.buffers()), None)) is not None:
            return first.device
        return torch.device("cpu") if self._trainer is None else self._trainer.accelerator.device

    @property
    def on_gpu(self) -> bool:
        """Whether the parameters are on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' floating-point format."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def current_epoch(self) -> int:
        """Epochs completed; 0 without a Trainer."""
        return 0 if self._trainer is None else self._trainer.current_epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps taken; 0 without a Trainer."""
        return 0 if self._trainer is None else self._trainer.global_step

    @property
    def global_rank(self) -> int:
        """This process's rank."""
        return 0 if self._trainer is None else self._trainer.global_rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its machine."""
        return 0 if self._trainer is None else self._trainer.local_rank

    @property
    def logger(self) -> Any:
        """The Trainer's first logger, or None."""
        return None if self._trainer is None else self._trainer.logger

    @property
    def loggers(self) -> list[Any]:
        """The Trainer's loggers."""
        return [] if self._trainer is None else self._trainer.loggers

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state["_trainer"] = state["_metrics"] = None
        state["_toggled"] = []
        state.pop("_compiler", None)
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
    """Return the task itself and the TaskModules inside it, at any depth."""
    return [part for part in task.modules() if isinstance(part, TaskModule)]


def has_own(owner: object, name: str, base: type) -> bool:
    """Return whether a method is the owner's, of its class or set on it, and not the base's. None is no method."""
    method = getattr(owner, name)
    return method is not None and getattr(method, "__func__", method) is not getattr(base, name)


def overrides(task: TaskModule, name: str) -> bool:
    """Return whether a task has a method ``name`` of its own. None disables the class's."""
    return has_own(task, name, TaskModule)


def log_to(task: TaskModule, metrics: Metrics | None) -> None:
    """Let ``log`` of the task, and of those in it, go to ``metrics``."""
    for part in task_modules(task):
        part.__dict__["_metrics"] = metrics  # a module's own assignment would cost, and is not wanted


@torch._disable_dynamo  # the public `torch.compiler.disable` would import the compiler here, which takes a second
def _log_outside(task: TaskModule, *args: Any, **kwargs: Any) -> None:
    task.log(*args, **kwargs)
