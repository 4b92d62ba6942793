"""Checks of a user-defined loop for models, optimizers and contexts that it forgot."""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping
from weakref import WeakSet, proxy

from torch import Tensor, nn
from torch.optim import Optimizer

from ...common.messages import format_count, name_type, warn
from ...strategies import is_wrapped_by_user
from .accumulation import Accumulation
from .nonfinite import iter_leaves
from .optimizer_state import list_parameters

_SEARCHED_PASSES = 3
_WATCHED_PASSES = 8  # several steps of loops with two or three models in turn


class LoopCheck:
    """Check of the first backward passes of a loop that calls `Accelerator.backward`.

    If ranks would diverge, an error is raised, otherwise a warning is shown. Each kind is reported once.

    Attributes:
        active: Whether backward passes are still checked.
        method: Name of the method that prepares models, for messages.
        set_up: Prepared models that are not in the Accelerator's list, as those of a `Fabric`.
    """

    method = "prepare"

    def __init__(self, accumulation: Accumulation) -> None:
        self._accumulation = proxy(accumulation)  # whose objects are freed as soon as it is dropped
        self.set_up: WeakSet[nn.Module] = WeakSet()
        self.reset()

    def reset(self) -> None:
        """Check the next backward passes again, which belong to another run."""
        self.active = True
        self._passes = 0
        self._reported: set[str] = set()
        self._optimizer: Optimizer | None = None
        self._marks: list[tuple[Tensor, int]] = []  # parameters and their versions, inside an accumulation group

    def check_models(self, models: tuple[nn.Module, ...]) -> None:
        """Check the models that are passed to `accumulate`.

        Raises:
            ValueError: With several ranks, if a model is trained and not prepared.
        """
        prepared = self._list_prepared()
        for model in models:
            trained = [p for p in self._accumulation.strategy.unwrap(model).parameters() if p.requires_grad]
            if any(id(p) not in prepared for p in trained) and not is_wrapped_by_user(trained):
                self._report(
                    "model",
                    f"accumulate got {name_type(model)}, which is not prepared, so {self._consequence()}. Pass the "
                    "model to prepare, and use the model that prepare returns.",
                    diverges=True,
                )

    def after_backward(self, loss: Tensor, models_only: bool = False) -> None:
        """Check the gradients of a backward pass.

        Args:
            loss: The loss.
            models_only: Whether to check for forgotten models only. Default: False.

        Raises:
            ValueError: With several ranks, if the gradients of trained parameters are not reduced.
        """
        self._passes += 1
        self._check_reach(loss, models_only)
        self._check_resume()
        if not models_only:
            self._check_accumulation()
            self._check_optimizer()
        if self._passes >= _WATCHED_PASSES + self._accumulation.micro_batches:
            self.active = False
            self._optimizer, self._marks = None, []

    def _check_reach(self, loss: Tensor, models_only: bool) -> None:
        accumulation = self._accumulation
        prepared = self._list_prepared()
        optimized = [p for p in self._list_optimized() if p.grad is not None and isinstance(p, nn.Parameter)]
        stray = [p for p in optimized if id(p) not in prepared]
        is_reached = any(p.grad is not None for p in prepared.values())
        if stray and is_reached and accumulation.world.size == 1:
            return  # for example a registered loss module
        if not (stray or is_reached):
            # The graph shows parameters whose gradients were used and removed in hooks.
            leaves = list({id(leaf): leaf for leaf, _ in iter_leaves(loss)}.values())
            known = {id(leaf) for model in self._list_models() for leaf, _ in accumulation.strategy.graph_leaves(model)}
            if not any(id(leaf) in known for leaf in leaves):
                stray = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
            if models_only and _find_optimizer({id(p): p for p in stray}) is None:
                stray = []  # a copy whose gradients the script moves itself, as in meta-learning
        if stray and not is_wrapped_by_user(stray):
            shapes = ", ".join(str(tuple(p.shape)) for p in stray[:3])
            self._report(
                "model",
                f"backward computed gradients of {format_count(len(stray), 'parameter')} (shapes {shapes}) that "
                f"{'is' if len(stray) == 1 else 'are'} not part of a prepared model, so {self._consequence()}. Pass "
                f"the module to {self.method}, and use the module that {self.method} returns. If each process trains "
                "a model of its own, call loss.backward().",
                diverges=True,
            )

    def _check_resume(self) -> None:
        cursor = self._accumulation.cursor
        resumed, cursor.resumed = cursor.resumed, None
        if resumed is not None and 0 < resumed[1] <= (skipped := cursor.number - resumed[0] - 1):
            self._report(
                "resume",
                f"after load_state, {format_count(skipped, 'batch')} had no backward pass. The dataloader continues "
                "after the batches before the checkpoint by itself, so a loop that skips them, such as `if step < "
                "resume_step: continue`, loses others. Remove it.",
            )

    def _check_accumulation(self) -> None:
        accumulation = self._accumulation
        count = accumulation.micro_batches
        steps = sum(optimizer.steps_taken + optimizer.skipped for optimizer in accumulation.optimizers)
        if count > 1 and not accumulation.entered and self._passes > 2 and steps >= self._passes - 1:
            self._report(
                "accumulate",
                f"gradient_accumulation_steps={count}, but the loop does not enter accumulate, so each batch is an "
                f"optimizer step on 1/{count} of its gradient. Put the body of the loop into `with "
                "accelerator.accumulate(model):`, or set gradient_accumulation_steps=1.",
            )

    def _check_optimizer(self) -> None:
        accumulation = self._accumulation
        covered = set(map(id, self._list_optimized()))
        trained = {key: p for key, p in self._list_prepared().items() if p.grad is not None and key not in covered}
        if self._optimizer is None and trained and self._passes <= _SEARCHED_PASSES:
            self._optimizer = _find_optimizer(trained)
        if self._optimizer is None:
            return
        subject = f"{name_type(self._optimizer)} trains a prepared model, but is not prepared, so"
        fix = "Pass the optimizer to prepare, and use the optimizer that prepare returns."
        if any(p._version != version for p, version in self._marks):
            self._report("step", f"{subject} it steps inside an accumulation group. {fix}", diverges=True)
        self._marks = [] if accumulation.sync_gradients else [(p, p._version) for p in trained.values()]
        lost = "its steps are not counted, and save_state does not contain its state"
        if accumulation.loss_scale is not None:
            lost += ", and its gradients stay multiplied by the float16 loss scale"
        self._report("optimizer", f"{subject} {lost}. {fix}")

    def warn_if_nothing_is_saved(self, registered: Collection[str]) -> None:
        """Warn if a checkpoint of a loop would contain no model, no optimizer and no ``registered`` object."""
        if not (self._accumulation.models or self._accumulation.optimizers or registered):
            self._report(
                "save",
                "save_state saves no model and no optimizer, because none is prepared. Pass them to prepare before the "
                "loop.",
            )

    def _list_optimized(self) -> list[Tensor]:
        return [p for optimizer in self._accumulation.optimizers for p in list_parameters(optimizer)]

    def _list_models(self) -> list[nn.Module]:
        return [*self._accumulation.models, *self.set_up]

    def _list_prepared(self) -> dict[int, Tensor]:
        unwrap = self._accumulation.strategy.unwrap
        return {id(p): p for model in self._list_models() for p in unwrap(model).parameters()}

    def _consequence(self) -> str:
        size = self._accumulation.world.size
        if size > 1:
            return f"its gradients are not averaged over the {size} processes, whose models would diverge"
        return "save_state does not contain it, and several processes would train different models"

    def _report(self, kind: str, text: str, diverges: bool = False) -> None:
        if diverges and self._accumulation.world.size > 1:
            raise ValueError(text)
        if kind not in self._reported:
            self._reported.add(kind)
            warn(text)


def _find_optimizer(parameters: Mapping[int, Tensor]) -> Optimizer | None:
    """Return an optimizer of the parameters, given by id. It takes about 100 ms, which only a faulty loop spends."""
    for value in gc.get_objects():
        if not issubclass(type(value), Optimizer) or "param_groups" not in vars(value):  # isinstance wakes up proxies
            continue
        if any(id(p) in parameters for p in list_parameters(value)):
            return value
    return None
