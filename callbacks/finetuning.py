"""Callbacks that freeze modules before training and unfreeze them later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..common.messages import announce, format_count, warn
from ..common.validation import check_bool, check_int, check_number
from ..engine.checkpoint import open_callback_states
from ..strategies.distributed import strip_compile_prefix
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer

Modules = nn.Module | Iterable[Any]


def multiplicative(epoch: int) -> float:
    """Return 2, the default factor by which `BackboneFinetuning` raises the backbone's learning rate.

    Args:
        epoch: Ignored.
    """
    return 2.0


class BaseFinetuning(Callback):
    """Base class of callbacks that freeze modules before training and unfreeze them later.

    Override `freeze_before_training` to freeze modules before the optimizer is created. Override `finetune_function` to
    unfreeze them, for example with `unfreeze_and_add_param_group`. Create the optimizer from
    ``filter(lambda p: p.requires_grad, self.parameters())``. A resumed run restores the set of trained parameters and
    the parameter groups.

    Raises:
        ValueError: In ``fit``, if the model is sharded. On resume, if ``configure_optimizers``
            builds parameter groups that differ from the corresponding groups in the checkpoint.
        NotImplementedError: In ``fit``, if one of the two methods is not overridden.

    Examples:
        >>> import torch
        >>> import treadle as tl
        >>> from treadle.callbacks import BaseFinetuning
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> class Model(BoringModel):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.encoder = torch.nn.Linear(32, 32)
        ...     def forward(self, x):
        ...         return self.layer(self.encoder(x))
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)
        >>> class TrainEncoderLater(BaseFinetuning):
        ...     def freeze_before_training(self, pl_module):
        ...         self.freeze(pl_module.encoder)
        ...     def finetune_function(self, pl_module, epoch, optimizer):
        ...         if epoch == 1:
        ...             self.unfreeze_and_add_param_group(pl_module.encoder, optimizer)
        >>> trainer = tl.Trainer(
        ...     max_epochs=2,
        ...     limit_train_batches=1,
        ...     accelerator="cpu",
        ...     devices=1,
        ...     barebones=True,
        ...     callbacks=TrainEncoderLater(),
        ... )
        >>> trainer.fit(Model())
        >>> [group["lr"] for group in trainer.optimizers[0].param_groups]
        [0.1, 0.01]
    """

    exchanges = True

    def __init__(self) -> None:
        self._layout: dict[str, Any] = {}

    # -- for methods that may be overridden ----------------------------------------------------------------------

    def freeze_before_training(self, pl_module: TaskModule) -> None:
        """Freeze the modules that are trained only later or not at all.

        Args:
            pl_module: The task.
        """
        raise NotImplementedError(f"{type(self).__name__} must define freeze_before_training(pl_module).")

    def finetune_function(self, pl_module: TaskModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze the modules that are trained from this epoch on. Runs at the start of each epoch for each optimizer.

        Args:
            pl_module: The task.
            epoch: Index of the epoch.
            optimizer: One of the task's optimizers.
        """
        raise NotImplementedError(f"{type(self).__name__} must define finetune_function(pl_module, epoch, optimizer).")

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """Return the modules at any depth that have no children or that directly contain parameters.

        Args:
            modules: A module or a (possibly nested) list of modules.
        """
        if isinstance(modules, nn.Module):
            nested_modules: Iterable[nn.Module] = modules.modules()
        else:
            nested_modules = [part for module in modules for part in BaseFinetuning.flatten_modules(module)]
        return [
            part for part in dict.fromkeys(nested_modules) if not any(True for _ in part.children()) or part._parameters
        ]

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[nn.Parameter]:
        """Yield the trained parameters of modules or, with ``requires_grad=False``, the frozen ones.

        Args:
            modules: A module or a (possibly nested) list of modules.
            train_bn: Include the parameters of BatchNorm layers. Default: True.
            requires_grad: Yield the trained parameters (True) or the frozen ones (False). Default: True.
        """
        for part in BaseFinetuning.flatten_modules(modules):
            if train_bn or not _is_norm(part):
                yield from (p for p in part.parameters(recurse=False) if p.requires_grad == requires_grad)

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Unfreeze modules and put their BatchNorm layers in training mode.

        Args:
            modules: A module or a (possibly nested) list of modules.
        """
        for part in BaseFinetuning.flatten_modules(modules):
            if _is_norm(part):
                part.train()
            for parameter in part.parameters(recurse=False):
                parameter.requires_grad = True

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze a module's own parameters. A BatchNorm layer is put in evaluation mode, so its statistics stay fixed.

        Args:
            module: Module to freeze, without its submodules.
        """
        if _is_norm(module):
            module.eval()
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad = False

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze the parameters of modules.

        Args:
            modules: A module or a (possibly nested) list of modules.
            train_bn: Make BatchNorm layers trainable instead of freezing them. Default: True.
        """
        for part in BaseFinetuning.flatten_modules(modules):
            if train_bn and _is_norm(part):
                BaseFinetuning.make_trainable(part)
            else:
                BaseFinetuning.freeze_module(part)

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[Tensor]) -> list[Tensor]:
        """Return the parameters in ``params`` that are not in the optimizer yet.

        Args:
            optimizer: The optimizer.
            params: The parameters.
        """
        optimized_ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [parameter for parameter in params if id(parameter) not in optimized_ids]

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze modules and add their parameters as a new group, except those that are already in the optimizer.

        Args:
            modules: The modules to unfreeze.
            optimizer: Optimizer to which the group is added.
            lr: Learning rate of the group. Default: the first group's rate divided by ``initial_denom_lr``.
            initial_denom_lr: Divisor for the default of ``lr``. Default: 10.0.
            train_bn: Include BatchNorm layers. Default: True.
        """
        parts = BaseFinetuning.flatten_modules(modules)
        parts = [part for part in parts if train_bn or not _is_norm(part)]
        for part in parts:
            BaseFinetuning.make_trainable([part])
        added = BaseFinetuning.filter_on_optimizer(optimizer, BaseFinetuning.filter_params(parts))
        if added:
            rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else float(lr)
            optimizer.add_param_group({"params": added, "lr": rate})

    # -- hooks ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """In ``fit``, call `freeze_before_training`."""
        if stage != "fit":
            return
        strategy = trainer.accelerator.strategy
        if strategy.sharded:
            raise ValueError(
                f"{type(self).__name__} cannot run with strategy={strategy.name!r}, because a sharded "
                "model must train the same parameters throughout a run. Use strategy='ddp', or freeze the parameters "
                "in the task's __init__ and unfreeze them before another fit."
            )
        self._layout = {}
        self.freeze_before_training(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """In a resumed run, restore the set of trained parameters and the parameter groups."""
        if trainer.opened_checkpoint is not None:
            states = open_callback_states(trainer.opened_checkpoint)["callbacks"]
            if layout := states.get(self.state_key, {}).get("made"):
                _apply_layout(layout, trainer, pl_module)
        self._layout = _describe_layout(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Call `finetune_function` for each optimizer, unless the run resumes in the middle of the epoch."""
        if trainer.progress.batch:
            return
        for optimizer in trainer.optimizers:
            self.finetune_function(pl_module, trainer.progress.epoch, optimizer)
        layout = _describe_layout(trainer, pl_module)
        if layout != self._layout:
            if trainer.last_step is not None:
                trainer.last_step.changed()
            if layout["trained"] != self._layout["trained"]:
                trainer.rewrap()
            self._layout = layout

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the trained parameters, of each group's parameters, and of modules in evaluation mode."""
        return {"made": self._layout}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing. `on_fit_start` restores the state."""


class BackboneFinetuning(BaseFinetuning):
    """Callback that freezes the task's ``backbone``, unfreezes it later, and then changes its learning rate each epoch.

    Args:
        unfreeze_backbone_at_epoch: Index of the first epoch in which the backbone is trained. Default: 10.
        lambda_func: Function that returns the factor by which the backbone's rate is multiplied in each later epoch.
            Its argument is the index of that epoch plus 1. Default: `multiplicative`, which returns 2.
        backbone_initial_ratio_lr: Initial rate of the backbone, as a fraction of the first group's rate. Default: 0.1.
        backbone_initial_lr: Initial rate of the backbone; overrides ``backbone_initial_ratio_lr``. Default: None.
        should_align: When ``lambda_func`` is applied, cap the backbone's rate at the first group's rate. Default: True.
        initial_denom_lr: Ignored; accepted for compatibility with Lightning. Default: 10.0.
        train_bn: Train the backbone's BatchNorm layers from the start. If False, they stay frozen in evaluation mode.
            Default: True.
        verbose: Announce the learning rates in each epoch in which the backbone is trained. Default: False.
        rounding: Number of decimal places in the announced rates. Default: 12.

    Attributes:
        previous_backbone_lr: Latest learning rate that the callback set for the backbone, or None.

    Raises:
        ValueError, TypeError: If an argument is invalid.
        ValueError: In ``fit``, if the task does not have a backbone, or if ``configure_optimizers`` returns several
            optimizers. `BaseFinetuning` lists further cases.

    Examples:
        >>> import torch
        >>> import treadle as tl
        >>> from treadle.callbacks import BackboneFinetuning
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> class Model(BoringModel):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.backbone = torch.nn.Linear(32, 32)
        ...     def forward(self, x):
        ...         return self.layer(self.backbone(x))
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)
        >>> callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1)
        >>> trainer = tl.Trainer(
        ...     max_epochs=2,
        ...     limit_train_batches=1,
        ...     accelerator="cpu",
        ...     devices=1,
        ...     barebones=True,
        ...     callbacks=callback,
        ... )
        >>> trainer.fit(Model())
        >>> round(callback.previous_backbone_lr, 4)
        0.01
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float = 0.1,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        super().__init__()
        if not callable(lambda_func):
            raise TypeError(f"lambda_func={lambda_func!r} must be a function of the epoch.")
        first = backbone_initial_lr
        self.unfreeze_backbone_at_epoch = check_int("unfreeze_backbone_at_epoch", unfreeze_backbone_at_epoch, 0)
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = check_number("backbone_initial_ratio_lr", backbone_initial_ratio_lr, 0.0)
        self.backbone_initial_lr = None if first is None else check_number("backbone_initial_lr", first, 0.0)
        self.should_align = check_bool("should_align", should_align)
        self.initial_denom_lr = check_number("initial_denom_lr", initial_denom_lr)
        self.train_bn = check_bool("train_bn", train_bn)
        self.verbose = check_bool("verbose", verbose)
        self.rounding = check_int("rounding", rounding, 0)
        self.previous_backbone_lr: float | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the callback."""
        return {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the backbone's learning rate."""
        self.previous_backbone_lr = state_dict["previous_backbone_lr"]

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """In ``fit``, freeze the backbone."""
        if stage == "fit" and not isinstance(getattr(pl_module, "backbone", None), nn.Module):
            raise ValueError(
                f"BackboneFinetuning needs a module named 'backbone', but {type(pl_module).__name__} has none. Create "
                "it in __init__ or setup; configure_model is too late."
            )
        super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Check that only one optimizer will train the backbone, and remove the frozen parameters from it."""
        count = len(trainer.optimizers)
        if count > 1 and type(self).finetune_function is BackboneFinetuning.finetune_function:
            raise ValueError(
                f"configure_optimizers returned {count} optimizers, and BackboneFinetuning would add the backbone to "
                "each of them. Return one optimizer, or override finetune_function so that it selects one."
            )
        frozen_ids = {id(p) for p in pl_module.backbone.parameters() if not p.requires_grad}  # type: ignore[union-attr]
        removed = 0
        for group in (group for optimizer in trainer.optimizers for group in optimizer.param_groups):
            trained = [parameter for parameter in group["params"] if id(parameter) not in frozen_ids]
            removed += len(group["params"]) - len(trained)
            group["params"] = trained
        if removed:
            warn(
                f"configure_optimizers passed {format_count(removed, 'parameter')} of the frozen backbone to an "
                "optimizer. BackboneFinetuning removes them, and adds them as a new group later. Build the optimizer "
                "from filter(lambda p: p.requires_grad, self.parameters())."
            )
        super().on_fit_start(trainer, pl_module)

    def freeze_before_training(self, pl_module: TaskModule) -> None:
        """Freeze the backbone, except for its BatchNorm layers if ``train_bn`` is True.

        Args:
            pl_module: The task.
        """
        backbone: nn.Module = pl_module.backbone  # type: ignore[assignment]
        self.freeze(backbone, train_bn=self.train_bn)
        norms = 0 if self.train_bn else sum(map(_is_norm, backbone.modules()))
        if norms:  # Lightning trains them regardless
            layers = format_count(norms, "BatchNorm layer")
            announce(f"train_bn=False keeps {layers} in the backbone frozen for the whole run")

    def finetune_function(self, pl_module: TaskModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze the backbone in epoch ``unfreeze_backbone_at_epoch``, and change its learning rate in later epochs.

        Args:
            pl_module: The task.
            epoch: Index of the epoch.
            optimizer: The optimizer.
        """
        rate = float(optimizer.param_groups[0]["lr"])
        if epoch == self.unfreeze_backbone_at_epoch:
            first = self.backbone_initial_lr
            self.previous_backbone_lr = rate * self.backbone_initial_ratio_lr if first is None else first
            self.unfreeze_and_add_param_group(
                pl_module.backbone,  # type: ignore[arg-type]
                optimizer,
                self.previous_backbone_lr,
                train_bn=self.train_bn,
            )
        elif epoch > self.unfreeze_backbone_at_epoch and self.previous_backbone_lr is not None:
            next_rate = self.lambda_func(epoch + 1) * self.previous_backbone_lr
            self.previous_backbone_lr = rate if self.should_align and next_rate > rate else next_rate
            optimizer.param_groups[-1]["lr"] = self.previous_backbone_lr
        if self.verbose and self.previous_backbone_lr is not None:
            backbone_rate = round(self.previous_backbone_lr, self.rounding)
            announce(f"learning rate: {round(rate, self.rounding)}; learning rate of the backbone: {backbone_rate}")


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def _describe_layout(trainer: Trainer, task: TaskModule) -> dict[str, Any]:
    """Return the names of the trained parameters, of each group's parameters, and of layers in evaluation mode."""
    names = {id(parameter): strip_compile_prefix(name) for name, parameter in task.named_parameters()}
    return {
        "trained": [
            strip_compile_prefix(name) for name, parameter in task.named_parameters() if parameter.requires_grad
        ],
        "evaluation": [strip_compile_prefix(name) for name, part in task.named_modules() if not part.training],
        "groups": [
            [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ],
    }


def _join_sizes(groups: list[list[str]]) -> str:
    return ", ".join(str(len(names)) for names in groups)


def _apply_layout(layout: dict[str, Any], trainer: Trainer, task: TaskModule) -> None:
    """Apply a layout that `_describe_layout` returned to the model and the optimizers."""
    trained, evaluation = set(layout["trained"]), set(layout["evaluation"])
    parameters = {strip_compile_prefix(name): parameter for name, parameter in task.named_parameters()}
    current_groups = _describe_layout(trainer, task)["groups"]
    for optimizer, current, saved in zip(trainer.optimizers, current_groups, layout["groups"], strict=False):
        if saved[: len(current)] != current:
            raise ValueError(
                f"the parameter groups that configure_optimizers built for {type(optimizer).__name__} differ from "
                f"those in the checkpoint (parameters per group: {_join_sizes(current)}; in the checkpoint: "
                f"{_join_sizes(saved[: len(current)])}). Build the same groups from the parameters that are not "
                "frozen."
            )
        for group in saved[len(current) :]:
            optimizer.add_param_group({"params": [parameters[name] for name in group]})
    for name, parameter in parameters.items():
        parameter.requires_grad = name in trained
    for name, part in task.named_modules():
        part.training = strip_compile_prefix(name) not in evaluation
