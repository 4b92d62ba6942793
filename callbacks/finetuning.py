"""Train a part of the model first, and more of it later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..common.messages import announce
from ..common.validation import check_bool, check_int, check_number
from ..engine import strip_compile_prefix
from ..engine.checkpoint import open_callback_states
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer

Modules = nn.Module | Iterable[Any]


def multiplicative(epoch: int) -> float:
    """Return the factor by which `BackboneFinetuning` raises the backbone's learning rate in every epoch: 2."""
    return 2.0


class BaseFinetuning(Callback):
    """Freezes parts of the model before training, and gives them to the optimizer later: override two methods.

    ``freeze_before_training(pl_module)`` is called in ``setup``, before the optimizer is made; build that from
    ``filter(lambda p: p.requires_grad, self.parameters())``. ``finetune_function(pl_module, epoch, optimizer)`` is
    called when an epoch begins, and may call `unfreeze_and_add_param_group`.

    A run that goes on has the same parameters trained, in the same groups, and BatchNorm layers in the same mode. It
    acts before the task's own hooks (``after_task`` is 0).

    Raises:
        ValueError: Before the first step, where the model is sharded or the optimizer's state is (ZeRO): what is
            trained is decided there once. On going on, if ``configure_optimizers`` makes other groups.
    """

    exchanges = True

    def __init__(self) -> None:
        self._layout: dict[str, Any] = {}

    # -- for the methods to be overridden ------------------------------------------------------------------------

    def freeze_before_training(self, pl_module: TaskModule) -> None:
        """Freeze what is not to be trained at first."""
        raise NotImplementedError(f"{type(self).__name__} needs a freeze_before_training(pl_module).")

    def finetune_function(self, pl_module: TaskModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze what is to be trained from this epoch on. Called for each optimizer."""
        raise NotImplementedError(f"{type(self).__name__} needs a finetune_function(pl_module, epoch, optimizer).")

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """The modules within, of any nesting, that have no parts, or parameters of their own."""
        if isinstance(modules, nn.ModuleDict):
            modules = modules.values()
        if isinstance(modules, nn.Module) and not isinstance(modules, nn.ModuleList | nn.Sequential):
            nested_modules: Iterable[nn.Module] = modules.modules()
        else:
            nested_modules = [part for module in modules for part in BaseFinetuning.flatten_modules(module)]  # type: ignore[union-attr]
            if isinstance(modules, nn.Module):
                nested_modules = [*nested_modules, modules]
        return [
            part for part in dict.fromkeys(nested_modules) if not any(True for _ in part.children()) or part._parameters
        ]

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[nn.Parameter]:
        """The parameters of modules that are trained, or that are not; without BatchNorm's unless ``train_bn``."""
        for part in BaseFinetuning.flatten_modules(modules):
            if train_bn or not _is_norm(part):
                yield from (p for p in part.parameters(recurse=False) if p.requires_grad == requires_grad)

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Let modules be trained; BatchNorm follows the data again."""
        for part in BaseFinetuning.flatten_modules(modules):
            if _is_norm(part):
                part.train()
            for parameter in part.parameters(recurse=False):
                parameter.requires_grad = True

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze a module's own parameters; BatchNorm keeps its statistics and computes with them."""
        if _is_norm(module):
            module.eval()
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad = False

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze modules, but not their BatchNorm layers unless ``train_bn`` is False."""
        for part in BaseFinetuning.flatten_modules(modules):
            if train_bn and _is_norm(part):
                BaseFinetuning.make_trainable(part)
            else:
                BaseFinetuning.freeze_module(part)

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[Tensor]) -> list[Tensor]:
        """Those of the parameters that the optimizer does not have yet."""
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
        """Unfreeze modules, and give their parameters to the optimizer as a group of their own.

        Args:
            modules: What to train from now on.
            optimizer: Who is to train it.
            lr: The group's learning rate; by default the first group's, divided by ``initial_denom_lr``.
            initial_denom_lr: See ``lr``.
            train_bn: Whether BatchNorm layers are trained too. If False, their parameters, statistics and mode stay as
                they are: frozen if they were frozen before.
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
        """Freeze, before the optimizer is made."""
        if stage != "fit":
            return
        strategy = trainer.accelerator.strategy
        if strategy.sharded:
            raise ValueError(
                f"{type(self).__name__} can't run with strategy={strategy.name!r}: which parameters are trained is "
                "decided when the model is sharded. Use 'ddp', or freeze in the task's __init__ and fit again later."
            )
        self._layout = {}
        self.freeze_before_training(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Let a run that goes on have the parameters trained, and the groups, that it had when it was saved."""
        if trainer.opened_checkpoint is not None:
            states = open_callback_states(trainer.opened_checkpoint)["callbacks"]
            if layout := states.get(self.state_key, {}).get("made"):
                _apply_layout(layout, trainer, pl_module)
        for optimizer in trainer.optimizers:
            if trainer.accelerator.strategy.keeps_apart(optimizer):
                raise ValueError(
                    f"{type(self).__name__} can't run with DDP(zero=True), which shares out the optimizer's parameters "
                    "once, before training. Leave out zero."
                )
        self._layout = _describe_layout(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Unfreeze what is due; not again in an epoch that a run goes on with."""
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
        """See `Callback.state_dict`."""
        return {"made": self._layout}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`. `on_fit_start` has done it, as the optimizer's state needs its groups."""


class BackboneFinetuning(BaseFinetuning):
    """Trains ``self.backbone`` of the task only from an epoch on, at a learning rate that grows to that of the rest.

    Args:
        unfreeze_backbone_at_epoch: The epoch, counted from 0.
        lambda_func: By what the backbone's rate is multiplied in each further epoch, by the epoch after it.
        backbone_initial_ratio_lr: Its first rate, as a share of the first group's.
        backbone_initial_lr: Its first rate itself.
        should_align: It never exceeds the first group's.
        initial_denom_lr: Accepted for Lightning's signature: the first rate is known, so nothing is divided by it.
        train_bn: Whether BatchNorm layers of the backbone are trained, from the beginning. If False, they stay frozen
            in evaluation mode for the whole run.
        verbose: Say the rates.
        rounding: Digits to say them with.

    Raises:
        ValueError: For a value that can't be; before the first step, if there is no backbone, or the optimizer has its
            frozen parameters already.
        TypeError: For a value of another kind.
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
            raise TypeError(f"lambda_func={lambda_func!r} is no function of an epoch.")
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
        """See `Callback.state_dict`."""
        return {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`."""
        self.previous_backbone_lr = state_dict["previous_backbone_lr"]

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """See `BaseFinetuning.setup`."""
        if stage == "fit" and not isinstance(getattr(pl_module, "backbone", None), nn.Module):
            raise ValueError(
                f"BackboneFinetuning needs {type(pl_module).__name__} to have a module named backbone; make it in "
                "__init__ or setup, as it is frozen before configure_model."
            )
        super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """See `BaseFinetuning.on_fit_start`."""
        frozen_ids = {id(p) for p in pl_module.backbone.parameters() if not p.requires_grad}  # type: ignore[union-attr]
        optimized_ids = {id(p) for o in trainer.optimizers for group in o.param_groups for p in group["params"]}
        if frozen_ids & optimized_ids:
            raise ValueError(
                "configure_optimizers gave the optimizer parameters of the frozen backbone, which get a group of their "
                "own later: build it from filter(lambda p: p.requires_grad, self.parameters())."
            )
        super().on_fit_start(trainer, pl_module)

    def freeze_before_training(self, pl_module: TaskModule) -> None:
        """Freeze the backbone."""
        backbone: nn.Module = pl_module.backbone  # type: ignore[assignment]
        self.freeze(backbone, train_bn=self.train_bn)
        norms = 0 if self.train_bn else sum(map(_is_norm, backbone.modules()))
        if norms:  # Lightning trains them all the same
            announce(f"train_bn=False: {norms} BatchNorm layers of the backbone stay frozen for the whole run")

    def finetune_function(self, pl_module: TaskModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze the backbone, or raise its rate."""
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
            announce(f"learning rates: {round(rate, self.rounding)}, backbone {backbone_rate}")


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def _describe_layout(trainer: Trainer, task: TaskModule) -> dict[str, Any]:
    """What is trained, in which groups, and which layers are in evaluation mode, by names."""
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


def _apply_layout(layout: dict[str, Any], trainer: Trainer, task: TaskModule) -> None:
    """Bring about what `_describe_layout` described."""
    trained, evaluation = set(layout["trained"]), set(layout["evaluation"])
    parameters = {strip_compile_prefix(name): parameter for name, parameter in task.named_parameters()}
    current_groups = _describe_layout(trainer, task)["groups"]
    for optimizer, current, saved in zip(trainer.optimizers, current_groups, layout["groups"], strict=False):
        if saved[: len(current)] != current:
            raise ValueError(
                f"the checkpoint's {type(optimizer).__name__} began with other groups of parameters: "
                "configure_optimizers has to make those that it made then, of the parts that are not frozen."
            )
        for group in saved[len(current) :]:
            optimizer.add_param_group({"params": [parameters[name] for name in group]})
    for name, parameter in parameters.items():
        parameter.requires_grad = name in trained
    for name, part in task.named_modules():
        part.training = strip_compile_prefix(name) not in evaluation
