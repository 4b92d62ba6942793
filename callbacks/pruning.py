"""`ModelPruning`: prunes weights during training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import prune

from ..common.messages import announce, name_type
from ..common.validation import check_bool, check_int, choose
from ..engine.checkpoint import open_callback_states
from ..strategies.distributed import strip_compile_prefix
from ._pruning import PrunedParameter, find_prunable
from .callback import Callback
from .weight_averaging import WeightAveraging

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer

Places = Sequence[tuple[nn.Module, str]]
_KEY = "model_pruning"
_NAMES = ("weight", "bias")
_FUNCTIONS: dict[str, tuple[Callable[..., Any], type[prune.BasePruningMethod]]] = {
    "ln_structured": (prune.ln_structured, prune.LnStructured),
    "l1_unstructured": (prune.l1_unstructured, prune.L1Unstructured),
    "random_structured": (prune.random_structured, prune.RandomStructured),
    "random_unstructured": (prune.random_unstructured, prune.RandomUnstructured),
}


class ModelPruning(Callback):
    """Callback that prunes parameters at the end of epochs or after validations and keeps the pruned weights at zero.

    A checkpoint contains the pruned weights under their original names, so they can be loaded into an unpruned model.
    It also contains the masks and the unmasked values for a resumed run. All processes use rank zero's masks.

    Args:
        pruning_fn: ``"l1_unstructured"``, ``"random_unstructured"``, ``"ln_structured"``, ``"random_structured"``, or
            a subclass of torch's ``BasePruningMethod`` for unstructured pruning. A class requires
            ``use_global_unstructured=True``.
        parameters_to_prune: Pairs of a module and the name of one of its parameters. Default: the parameters that
            ``parameter_names`` selects in all submodules of the task.
        parameter_names: Names of the parameters to prune if ``parameters_to_prune`` is not set: ``"weight"``,
            ``"bias"`` or both. Default: both.
        use_global_unstructured: Select the weights to prune from all layers together instead of from each layer
            separately. Structured pruning requires False. Default: True.
        amount: Fraction (float) or number (int) of the remaining weights to prune each time. In structured pruning, it
            refers to the remaining slices. May be a function of the epoch's index. Default: 0.5.
        apply_pruning: Whether to prune. May be a function of the epoch's index. Default: True.
        make_pruning_permanent: Replace weights and masks with the pruned weights when ``fit`` ends. Default: True.
        use_lottery_ticket_hypothesis: Reset the remaining weights to their initial values after each pruning. May be a
            function of the epoch's index. Default: True.
        resample_parameters: Must be False; accepted for compatibility with Lightning. Default: False.
        pruning_dim: Dimension along which structured pruning removes slices. Required for structured pruning. Default:
            None.
        pruning_norm: Order of the norm by which ``"ln_structured"`` compares slices. Required for
            ``"ln_structured"``. Default: None.
        verbose: 1 announces the number of pruned weights; 2 also announces it for each parameter. Default: 0.
        prune_on_train_epoch_end: Prune at the end of epochs (True) or after each validation (False). Default: True.

    Raises:
        ValueError, TypeError: If an argument is invalid, or arguments contradict each other.
        ValueError: In ``fit``, if the model is sharded, if there are no parameters to prune, or if a parameter to prune
            is not in the model.
        ValueError: In ``fit``, if the checkpoint was saved with a ModelPruning that did not prune every parameter that
            this one prunes, or if ``prune_on_train_epoch_end`` is False and a `WeightAveraging` is listed after this
            callback.
        IndexError: In ``fit``, if a parameter does not have the dimension ``pruning_dim``.

    References:
        Frankle and Carbin, "The Lottery Ticket Hypothesis: Finding Sparse, Trainable Neural Networks", 2019,
        https://arxiv.org/abs/1803.03635.

    Examples:
        >>> import treadle as tl
        >>> from treadle.callbacks import ModelPruning
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> pruning = ModelPruning("l1_unstructured", parameter_names=["weight"], amount=0.5)
        >>> trainer = tl.Trainer(
        ...     max_epochs=1,
        ...     limit_train_batches=1,
        ...     accelerator="cpu",
        ...     devices=1,
        ...     barebones=True,
        ...     callbacks=pruning,
        ... )
        >>> task = BoringModel()
        >>> trainer.fit(task)
        >>> int((task.layer.weight == 0).sum()), task.layer.weight.numel()
        (32, 64)
    """

    PARAMETER_NAMES = _NAMES
    exchanges = True

    def __init__(
        self,
        pruning_fn: Callable[..., Any] | str,
        parameters_to_prune: Places | None = None,
        parameter_names: list[str] | None = None,
        use_global_unstructured: bool = True,
        amount: int | float | Callable[[int], int | float] = 0.5,
        apply_pruning: bool | Callable[[int], bool] = True,
        make_pruning_permanent: bool = True,
        use_lottery_ticket_hypothesis: bool | Callable[[int], bool] = True,
        resample_parameters: bool = False,
        pruning_dim: int | None = None,
        pruning_norm: int | None = None,
        verbose: int = 0,
        prune_on_train_epoch_end: bool = True,
    ) -> None:
        if isinstance(amount, bool) or not (isinstance(amount, int | float) or callable(amount)):
            raise TypeError(f"amount={amount!r} must be a number, or a function of the epoch.")
        if check_int("verbose", verbose, 0) > 2:
            raise ValueError(f"verbose={verbose!r} must be 0, 1 or 2.")
        self._global = check_bool("use_global_unstructured", use_global_unstructured)
        self._options: dict[str, Any] = {}
        self.pruning_fn = self._choose_function(pruning_fn, pruning_dim, pruning_norm)
        self._requested_pairs = _check_pairs(() if parameters_to_prune is None else parameters_to_prune)
        self._names = tuple(choose("parameter_names", name, _NAMES) for name in parameter_names or _NAMES)
        self.amount = amount
        self._apply = _check_decision("apply_pruning", apply_pruning)
        self._permanent = check_bool("make_pruning_permanent", make_pruning_permanent)
        self._lottery = _check_decision("use_lottery_ticket_hypothesis", use_lottery_ticket_hypothesis)
        if check_bool("resample_parameters", resample_parameters):
            raise ValueError(
                "resample_parameters=True is not supported. Remove it to reset the remaining weights to their initial "
                "values, or override apply_lottery_ticket_hypothesis to reset them to others."
            )
        self._verbose = verbose
        self._at_epoch_end = check_bool("prune_on_train_epoch_end", prune_on_train_epoch_end)
        self._pruned: list[PrunedParameter] = []
        self._latest_epoch = -1

    def _choose_function(self, function: Any, dim: int | None, norm: int | None) -> Callable[..., Any]:
        if isinstance(function, str):
            name = choose("pruning_fn", function.lower(), _FUNCTIONS)
            if name.endswith("_structured"):
                for argument, value in (("pruning_dim", dim), ("pruning_norm", norm)):
                    if value is None and (argument == "pruning_dim" or name == "ln_structured"):
                        example = 0 if argument == "pruning_dim" else 2
                        raise ValueError(f"pruning_fn={name!r} needs {argument}. Set it, for example to {example}.")
                self._options = {"dim": dim} | ({"n": norm} if name == "ln_structured" else {})
            function = _FUNCTIONS[name][self._global]
        elif not (isinstance(function, type) and issubclass(function, prune.BasePruningMethod)):
            raise TypeError(
                f"pruning_fn={function!r} must be one of {', '.join(_FUNCTIONS)}, or a subclass of "
                "torch.nn.utils.prune.BasePruningMethod."
            )
        elif not self._global:
            raise ValueError(
                f"use_global_unstructured=False does not work with pruning_fn={function.__name__}, because a pruning "
                "class prunes all layers together. Set use_global_unstructured=True, or pass the name of a function: "
                f"{', '.join(_FUNCTIONS)}."
            )
        if self._global and function.PRUNING_TYPE != "unstructured":
            fix = "Set use_global_unstructured=False"
            if not self._options:  # a class, which prunes all layers together
                fix += ", and pass a name as pruning_fn, such as 'ln_structured'"
            raise ValueError(
                f"use_global_unstructured=True needs unstructured pruning, but {function.__name__} is "
                f"{function.PRUNING_TYPE}. {fix}."
            )
        return function  # type: ignore[no-any-return]

    def filter_parameters_to_prune(self, parameters_to_prune: Places = ()) -> Places:
        """Return the parameters to prune, as pairs of module and name. Override this method to select some of them.

        Args:
            parameters_to_prune: All pairs of module and name that can be selected.
        """
        return parameters_to_prune

    @staticmethod
    def sanitize_parameters_to_prune(
        pl_module: TaskModule, parameters_to_prune: Places | None = (), parameter_names: Sequence[str] = ()
    ) -> Places:
        """Return the parameters to prune, as pairs of module and name, after checking that they are in the model.

        Args:
            pl_module: The task.
            parameters_to_prune: Pairs of module and name. Default: the parameters that ``parameter_names`` selects in
                all submodules.
            parameter_names: Names of the parameters to select. Default: ``"weight"`` and ``"bias"``.

        Raises:
            TypeError: If ``parameters_to_prune`` does not consist of pairs.
            ValueError: If a module or a parameter is not in the model.
        """
        names = {id(part): strip_compile_prefix(name) for name, part in pl_module.named_modules()}
        pairs = _check_pairs(parameters_to_prune or ()) or find_prunable(pl_module, parameter_names or _NAMES)
        for part, name in pairs:
            if id(part) not in names:
                raise ValueError(
                    f"parameters_to_prune contains {name_type(part)} that is not in the model. Pass a module of the "
                    "task."
                )
            if not hasattr(part, name) and f"{name}_orig" not in part._parameters:
                raise ValueError(
                    f"parameters_to_prune contains {name!r}, which is not a parameter of "
                    f"{names[id(part)] or 'the task'} (parameters: "
                    f"{', '.join(dict(part.named_parameters(recurse=False))) or 'none'}). Correct the name."
                )
        return pairs

    # -- hooks ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Raise a ValueError if ``fit`` shards the model."""
        if stage == "fit" and (strategy := trainer.accelerator.strategy).sharded:
            raise ValueError(
                f"ModelPruning cannot run with strategy={strategy.name!r}, because torch's pruning compares the "
                "weights of full layers. Use strategy='ddp'."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Find the parameters to prune. On resume, restore the masks."""
        self._latest_epoch = -1
        after = trainer.callbacks[trainer.callbacks.index(self) :]
        if not self._at_epoch_end and (
            late := [callback for callback in after if isinstance(callback, WeightAveraging)]
        ):
            raise ValueError(
                "ModelPruning(prune_on_train_epoch_end=False) prunes when a validation ends, but the model still has "
                f"the averages of {type(late[0]).__name__} at that point. List {type(late[0]).__name__} before "
                "ModelPruning in callbacks."
            )
        saved: Mapping[str, Any] | None = None
        if trainer.opened_checkpoint is not None:
            saved = open_callback_states(trainer.opened_checkpoint)["added"].get(_KEY)
        names = {id(part): strip_compile_prefix(name) for name, part in pl_module.named_modules()}
        pairs = self.sanitize_parameters_to_prune(pl_module, self._requested_pairs, self._names)
        chosen = self.filter_parameters_to_prune(pairs)
        if not chosen:
            raise ValueError("ModelPruning found no parameters to prune. Pass them as parameters_to_prune.")
        keeps = self._lottery is not False
        self._pruned = [PrunedParameter(part, name, names[id(part)], keeps) for part, name in chosen]
        if saved is not None:
            self._latest_epoch = saved["latest_epoch"]
            for pruned in self._pruned:
                pruned.load(saved["parameters"].get(pruned.full_name))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Prune if ``prune_on_train_epoch_end`` is True."""
        progress = trainer.progress
        if self._at_epoch_end and progress.epoch_is_over and progress.epoch > self._latest_epoch:
            self._latest_epoch = progress.epoch
            self._run(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Prune if ``prune_on_train_epoch_end`` is False."""
        if not self._at_epoch_end and trainer.stage == "fit" and not trainer.sanity_checking:
            self._run(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """With ``make_pruning_permanent``, replace weights and masks with the pruned weights."""
        if self._permanent:
            if trainer.last_step is not None:
                trainer.last_step.changed()
            self.make_pruning_permanent(pl_module)

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """With ``make_pruning_permanent``, replace weights and masks with the pruned weights."""
        if stage == "fit" and self._permanent:
            self.make_pruning_permanent(pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Add the masks and the unmasked values to the checkpoint."""
        if self._pruned:
            parameters = {pruned.full_name: pruned.get_state() for pruned in self._pruned}
            record = checkpoint.setdefault(_KEY, {"parameters": {}})  # another ModelPruning may have added its own
            record["parameters"] |= parameters
            record["latest_epoch"] = self._latest_epoch

    # -- pruning -------------------------------------------------------------------------------------------------

    def make_pruning_permanent(self, module: nn.Module) -> None:
        """Replace weights and masks with the pruned weights.

        Args:
            module: Ignored.
        """
        for pruned in self._pruned:
            pruned.make_permanent()

    def apply_pruning(self, amount: int | float) -> None:
        """Prune some of the remaining weights or, in structured pruning, of the remaining slices.

        Args:
            amount: Fraction (float) or number (int) of the remaining weights or slices to prune.
        """
        for pruned in self._pruned:
            pruned.refresh()
        pairs = [(pruned.module, pruned.name) for pruned in self._pruned]
        if self._global:
            prune.global_unstructured(pairs, self.pruning_fn, amount=amount, **self._options)
        else:
            for part, name in pairs:
                self.pruning_fn(part, name=name, amount=amount, **self._options)
        for pruned in self._pruned:
            pruned.register_hooks()

    @torch.no_grad()
    def apply_lottery_ticket_hypothesis(self) -> None:
        """Reset the remaining weights to their initial values. Override this method to reset them to others."""
        for pruned in self._pruned:
            if pruned.first is not None:
                pruned.parameter.copy_(pruned.first)

    def _run(self, trainer: Trainer) -> None:
        epoch = trainer.progress.epoch
        amount = self.amount(epoch) if callable(self.amount) else self.amount
        if not _evaluate_decision(self._apply, epoch) or not amount:
            return
        if trainer.last_step is not None:
            trainer.last_step.changed()
        old_counts = [pruned.count_zeros() for pruned in self._pruned] if self._verbose else []
        self.apply_pruning(amount)
        if _evaluate_decision(self._lottery, epoch):
            self.apply_lottery_ticket_hypothesis()
        world = trainer.accelerator.world
        for pruned in self._pruned if world.size > 1 else ():  # random pruning differs between processes
            world.broadcast_tensor(pruned.mask)
            world.broadcast_tensor(pruned.parameter.detach())
        if self._verbose:
            self._announce_counts(old_counts)

    def _announce_counts(self, old: list[int]) -> None:
        new = [pruned.count_zeros() for pruned in self._pruned]
        sizes = [pruned.parameter.numel() for pruned in self._pruned]
        announce(f"pruned: {sum(old):,} -> {sum(new):,} of {sum(sizes):,} ({sum(new) / sum(sizes):.1%})")
        if self._verbose == 2:
            for pruned, old_count, new_count, size in zip(self._pruned, old, new, sizes, strict=True):
                announce(f"  {pruned.full_name}: {old_count:,} -> {new_count:,} of {size:,} ({new_count / size:.1%})")


def _check_pairs(places: Any) -> Places:
    if not isinstance(places, list | tuple) or not all(
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and isinstance(pair[0], nn.Module)
        and isinstance(pair[1], str)
        for pair in places
    ):
        raise TypeError(f"parameters_to_prune={places!r} must be a list of pairs, such as [(module, 'weight')].")
    return places


def _check_decision(name: str, value: Any) -> bool | Callable[[int], bool]:
    return value if callable(value) else check_bool(name, value)  # type: ignore[no-any-return]


def _evaluate_decision(decision: bool | Callable[[int], bool], epoch: int) -> bool:
    return bool(decision(epoch)) if callable(decision) else decision
