"""Agreement of all processes, at each optimizer step, on values that may be known to only one of them."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...strategies import BALLOT_SIZE, Strategy, World
from ...strategies.distributed import is_sharded, local
from ..data import Cursor
from .optimizer_state import list_parameters

if TYPE_CHECKING:
    from ..data import Outlook

_WEIGHT, _MISSING, _STOP, _TAINT, _LEAVE, _SIGNAL, _FULL, _ENDED = range(BALLOT_SIZE)


class Agreement:
    """Votes of all processes in an optimizer step, summed over the processes.

    On the CPU, and with ``immediate``, the result is read in the same step. Otherwise, the host reads it one step
    later, so that it does not wait for the device.

    Attributes:
        stop_vote: Whether this process requests a stop. The attribute may be set at any time.
        stop: Whether some process requested a stop and all processes have agreed on it.
        finite: Whether the checked losses and gradients were finite on every process, in the step that was read last.
        bad_losses: The indices within the step of this process's micro-batches whose loss was not finite.
        micro_batches: The number of micro-batches that ``bad_losses`` covers.
        next_place: An identifier of the current step, which the training loop sets.
        collected: Whether `collect` has summed the votes of the current step, which `count` has not read yet.
        missing: Number of samples, over all processes, in those batches of the step that were None.
        leave_vote: Whether this process votes to leave the epoch without taking this step.
        signaled: Whether some process received a signal to end the run and all processes have agreed on it.
        joined: Whether ranks may leave the loop at different times, as in `join_uneven_inputs`.
        on_host: Whether the gradients are in host memory, so that checks need not wait for a device.
        recent_losses: This process's losses of the latest micro-batches, for displays. Reading one that is on an
            accelerator waits for the device.
        not_finite: Flag on the device: 1.0 if the device must skip the step, else 0.0. None if the host decides.
    """

    def __init__(self, world: World, strategy: Strategy, cursor: Cursor) -> None:
        self.signal_vote = False
        self.watch_finite = self.joined = False
        self.alone = world.size == 1
        self.immediate = world.device.type == "cpu"
        self.recent_losses: deque[float | Tensor] = deque(maxlen=1)
        self._world = world
        self._cursor = cursor
        self._device = world.device
        self.on_host = world.device.type == "cpu"
        self._strategy = strategy
        self._has_nonfinite = torch.zeros((), dtype=torch.float32, device="cpu")  # creating one takes 1 us
        self.reset()

    def forget_losses(self) -> None:
        """Discard the recorded checks of losses and gradients, and votes that were cast but not read."""
        self.finite = self.local_finite = True
        self._gradients_finite = True  # as far as the host knows
        self.has_voted = self.collected = False
        self._summed: Tensor | None = None
        self.bad_losses: list[int] = []
        self.micro_batches = 0
        self._taints: list[Tensor] = []  # one per micro-batch: 0 for a finite loss, NaN for any other
        self._norms: list[Tensor] = []
        self._watched: list[Tensor] = []  # the parameters whose gradients were checked last, on a device
        self._bad_parameters: list[Tensor] | None = None
        self._watched_optimizers: Sequence[Optimizer] = ()  # whose gradients were checked last, on the host

    def reset(self) -> None:
        """Discard the votes of the previous run, except a signal that this process received."""
        self.forget_losses()
        self.stop_vote = self.stop = self.leave_vote = False
        self.signaled = self.signal_vote and self.alone  # a signal that was received before the first step counts
        self.leaves = self.missing = 0
        self.next_place: Any = None
        self._read_place: Any = None
        self._outlook: Outlook | None = None  # the outlook that the votes of the current step describe
        self._pending: Ballots | None = None
        self.not_finite: Tensor | None = None

    def keep_losses(self, number: int) -> None:
        """Discard ``recent_losses``, and keep this number of losses from now on."""
        self.recent_losses = deque(maxlen=number)

    def signal(self) -> None:
        """Record a signal that requests the end of the run. A signal handler may call this at any time."""
        self.signal_vote = True
        self.signaled |= self.alone

    def ask(self, stop: bool) -> bool:
        """Agree on a stop and on signals in a separate collective, and return whether any process requests a stop.

        Call this method on all ranks, in a step without votes.
        """
        self.stop, self.signaled = stop, self.signal_vote
        if not self.alone:
            votes = torch.tensor([stop, self.signal_vote], dtype=torch.int32, device="cpu")
            self.stop, self.signaled = map(bool, self._world.all_reduce(votes, "max").tolist())
        return self.stop

    def record_loss(self, loss: Tensor) -> bool:
        """Check whether the loss of one micro-batch is finite, if ``watch_finite`` is set. Return False if it is not.

        On accelerators, the result is True, because the check runs on the device without waiting for it.
        """
        if not self.watch_finite:
            self.recent_losses.append(loss.detach())
            return True
        if not self.on_host:
            detached = loss.detach().float()
            self.recent_losses.append(detached)
            self._taints.append(detached * 0.0)  # without a read on the host
            return True
        value = loss.item()
        self.recent_losses.append(value)
        finite = math.isfinite(value)
        if not finite:
            self.bad_losses.append(self.micro_batches)
            self.local_finite = False
            if self.alone:
                self.finite = False
        self.micro_batches += 1
        return finite

    def check_on_host(self, optimizers: Sequence[Optimizer]) -> bool:
        """Return whether the gradients that optimizers are about to apply are finite, if they are in host memory.

        It is several times as fast as ``torch._foreach_norm`` for small gradients (torch 2.13).
        """
        self._watched_optimizers = optimizers
        gradients = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    gradient = parameter.grad
                    if gradient is not None:
                        gradients.append(gradient)
        if not gradients:
            return True
        if self._strategy.sharded:
            gradients = [local(gradient) for gradient in gradients]
        found = self._has_nonfinite
        try:
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, _ONE)  # type: ignore[arg-type]
        except NotImplementedError:  # some gradient is sparse or complex
            return all(map(is_finite, gradients))
        if found.item() == 0.0:
            return True
        found.zero_()
        return False

    def watch_gradients(self, optimizers: Sequence[Optimizer]) -> None:
        """Check whether the reduced gradients that optimizers are about to apply are finite."""
        if self.on_host:
            self._gradients_finite = self.check_on_host(optimizers)
            return
        watched, gradients = collect_gradients(optimizers)
        if gradients:
            self._watched += watched
            self._norms.append(largest_elements(gradients, self._device))

    def vote(self, weight: float | Tensor | None, missing: int = 0) -> None:
        """Cast this process's votes, before or after the last backward pass of a step.

        ``weight`` is the sum of this process's weights in the step, or None; see `Accumulation.backward`. ``missing``
        is the number of samples in its batches that were None.
        """
        if self.joined and self._cursor.micro is None:
            raise ValueError(
                "inside join_uneven_inputs, backward(loss, weight=...) needs batches of a prepared DataLoader. "
                "Otherwise, a rank that has left the loop can't contribute to the sum of the weights. Prepare the "
                "DataLoader, or remove weight=..."
            )
        self.has_voted = True
        if self.alone:
            return
        votes = torch.zeros(BALLOT_SIZE, dtype=torch.float32, device=self._device)  # counts may exceed a bfloat16's 256
        if weight is not None:
            votes[_WEIGHT] = weight
        if missing:
            votes[_MISSING] = missing
        if self.stop_vote:
            votes[_STOP] = 1.0
        if self.leave_vote:
            votes[_LEAVE] = 1.0
        if self.signal_vote:
            votes[_SIGNAL] = 1.0
        outlook = self._outlook = self._cursor.outlook
        if outlook is not None:
            votes[_FULL], votes[_ENDED] = float(outlook.is_full), float(outlook.has_ended)
        if self._taints or self._norms or not (self.local_finite and self._gradients_finite):
            votes[_TAINT] = self.taint()
        self._strategy.start_agreement(votes)

    def taint(self) -> Tensor:
        """Return NaN if a checked loss or gradient of this process is not finite, else 0, as a tensor on the device."""
        if self.on_host:
            return torch.tensor(0.0 if self.local_finite and self._gradients_finite else math.nan, device="cpu")
        values = [*self._taints, *((norms * 0.0).sum() for norms in self._norms)]
        return torch.stack(values).sum() if values else torch.zeros((), device=self._device)

    @property
    def place(self) -> Any:
        """The value of ``next_place`` in the step that ``finite`` describes."""
        return self.next_place if self.immediate else self._read_place

    def finite_so_far(self, agreed_taint: Tensor | None) -> bool:
        """Return whether the losses and gradients since the last vote are finite.

        With ``immediate``, the method waits for the device. Otherwise, it sets ``not_finite`` and returns the result of
        the previous step.
        """
        taint = self.taint() if agreed_taint is None else self.taint() + agreed_taint.to(self._device)
        if self._strategy.sharded and not self.alone:  # each process has checked its own shards and losses
            taint = self._world.all_reduce(taint)
        if not self.immediate:
            self.read_pending()
            self.not_finite = flag_not_finite(taint)
            return self.finite
        finite = not math.isnan(taint.item())
        if not finite and not self.on_host:
            self._note_losses([taint.item() for taint in self._taints])
            self._bad_parameters = None  # those of the step that was read last
        return finite

    def _note_losses(self, taints: list[float]) -> None:
        self.bad_losses = [number for number, taint in enumerate(taints) if math.isnan(taint)]
        self.micro_batches = len(taints)
        self.local_finite = not self.bad_losses

    def collect(self) -> Tensor | None:
        """Sum the votes over the processes after the last backward pass of a step. `count` reads them afterwards.

        Returns:
            The total weight over all processes, as a 0-d tensor on the device; None with a world size of one.
        """
        self.collected = True
        self._summed = None if self.alone else self._strategy.agreement()
        return None if self._summed is None else self._summed[_WEIGHT]

    def count(self) -> Tensor | None:
        """Read the votes of `collect`, or those of the previous step if not ``immediate``, and return their weight."""
        summed, self._summed = self._summed, None
        if not (self.collected or self.alone):
            summed = self._strategy.agreement()
        self.has_voted = self.collected = False
        if self.on_host:
            if summed is not None:
                self._read_votes(summed.tolist(), self._outlook)
            if not self._gradients_finite:
                self.finite, self._gradients_finite = False, True
            if self.finite:
                self.micro_batches = 0
        elif summed is not None or self.watch_finite:
            ballots = Ballots(summed, self._taints, self._norms, self._watched, self.next_place, self._outlook)
            self._taints, self._norms, self._watched = [], [], []
            if self.immediate:
                self._read(ballots)
            else:
                self.read_pending()
                self.not_finite = ballots.flag_not_finite() if self.watch_finite else None
                self._pending = ballots.copy_to_host()
        if self.alone:
            self.stop = self.stop_vote
        return None if summed is None else summed[_WEIGHT]

    def _read_votes(self, votes: list[float], outlook: Outlook | None) -> None:
        self.stop = votes[_STOP] > 0
        self.leaves = round(votes[_LEAVE])
        self.missing = round(votes[_MISSING])
        self.signaled = votes[_SIGNAL] > 0
        self.finite = not math.isnan(votes[_TAINT])
        if outlook is not None:
            outlook.store_votes(votes[_FULL], votes[_ENDED], self._world.size)

    def _read(self, ballots: Ballots) -> None:
        votes, losses, norms = ballots.read()
        if votes is not None:
            self._read_votes(votes, ballots.outlook)
        self._note_losses(losses)
        self._bad_parameters = [p for p, norm in zip(ballots.watched, norms, strict=False) if not math.isfinite(norm)]
        self.finite = (self.finite if votes is not None else self.local_finite) and not self._bad_parameters
        self._read_place = ballots.place

    def read_pending(self) -> None:
        """Wait for the device, and read the values that would otherwise be read one step later."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._read(pending)

    def check_step(self, optimizer: Optimizer, place: Any) -> bool:
        """Check the gradients of a step without votes; `GradientGuard` calls this method of an agreement of its own.

        Replicas have the same gradients after the reduction, so only shards need an exchange.

        Returns:
            False if a gradient is not finite in the step that was read last, which `place` identifies.
        """
        self.next_place = place
        self.watch_gradients((optimizer,))
        self.collected = True
        if self._strategy.sharded:
            self._summed = torch.zeros(BALLOT_SIZE, dtype=torch.float32, device=self._device)
            self._summed[_TAINT] = self.taint()
            work = self._world.start_all_reduce(self._summed)
            if work is not None:
                work.wait()
        self.count()
        return self.finite

    def find_bad_parameters(self) -> list[Tensor]:
        """Return the parameters whose gradients were not finite on this process, in the step that was read last."""
        if self._bad_parameters is not None:
            return self._bad_parameters
        watched = (p for optimizer in self._watched_optimizers for p in list_parameters(optimizer))
        return find_bad(watched if self.on_host else self._watched)


class Ballots:
    """Values of one step that the host has not read yet: the summed votes, and this process's checks.

    Args:
        votes: The summed votes, or the summed flag of a `GradientGuard`, or None.
        taints: A 0-d tensor for each micro-batch's loss: 0 if the loss is finite, else NaN.
        norms: Vectors with the largest absolute value of each checked gradient.
        watched: The parameters whose gradients were checked, in the order of ``norms``.
        place: An identifier of the step.
        outlook: Object that receives the summed votes on an upcoming group; None without such votes.
    """

    def __init__(
        self,
        votes: Tensor | None,
        taints: list[Tensor],
        norms: list[Tensor],
        watched: list[Tensor],
        place: Any,
        outlook: Outlook | None = None,
    ) -> None:
        self.sizes = [0 if votes is None else len(votes), len(taints), len(watched) if norms else 0]
        values = [torch.stack(taints)] if taints else []
        values += norms
        values += [] if votes is None else [votes.float()]
        self.watched = watched
        self.place = place
        self.outlook = outlook
        self._on_device = torch.cat(values) if values else torch.zeros(0, device="cpu")
        self._on_host = self._on_device
        self._event: torch.cuda.Event | None = None

    def flag_not_finite(self) -> Tensor:
        """Return 1.0 on the device if one of the values is not finite, else 0.0."""
        return flag_not_finite(self._on_device)

    def copy_to_host(self) -> Ballots:
        """Start an asynchronous copy to the host if the values are on a CUDA device. Return this object."""
        if self._on_device.is_cuda:
            self._on_host = torch.empty_like(self._on_device, device="cpu", pin_memory=True)
            self._on_host.copy_(self._on_device, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)  # otherwise each waiting rank keeps a core busy
            self._event.record()
        return self

    def read(self) -> tuple[list[float] | None, list[float], list[float]]:
        """Wait for the copy to the host, and return the votes, the taints and the norms."""
        if self._event is not None:
            self._event.synchronize()
        values = self._on_host.tolist()
        votes, taints, norms = self.sizes
        return values[taints + norms :] if votes else None, values[:taints], values[taints : taints + norms]


# -- checks of gradients -------------------------------------------------------------------------------------------

_ONE = torch.ones((), dtype=torch.float32, device="cpu")


def collect_gradients(optimizers: Iterable[Optimizer]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters of ``optimizers`` that have gradients, and these gradients as real, dense tensors."""
    parameters = [p for optimizer in optimizers for p in list_parameters(optimizer) if p.grad is not None]
    return parameters, [real_values(p.grad) for p in parameters if p.grad is not None]


def largest_elements(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return a vector with the largest absolute value of each gradient. NaN and infinity propagate to it."""
    norms = [norm.float() for norm in torch._foreach_norm(gradients, math.inf)]  # type: ignore[arg-type]
    return torch.stack([norm.to(device, non_blocking=True) for norm in norms])


def flag_not_finite(values: Tensor) -> Tensor:
    """Return a tensor on the device of ``values`` that is 1.0 if one of them is not finite, else 0.0.

    torch's kernel also multiplies ``values`` by 1 in place.
    """
    flag = torch.zeros((), dtype=torch.float32, device=values.device)
    torch._amp_foreach_non_finite_check_and_unscale_([values], flag, _one_on(values.device))  # type: ignore[arg-type]
    return flag


@functools.cache
def _one_on(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


def real_values(gradient: Tensor) -> Tensor:
    """Return the local values of a gradient, which may be sharded, sparse or complex, as a real, dense tensor."""
    if is_sharded(gradient):
        gradient = local(gradient)
    if gradient.is_sparse:
        gradient = gradient._values()
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


def find_bad(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Wait for the device, and return the parameters whose gradients are not finite."""
    return [p for p in parameters if p.grad is not None and not is_finite(p.grad)]


def is_finite(gradient: Tensor) -> bool:
    """Wait for the device, and return whether all values of one gradient are finite."""
    return bool(torch.isfinite(real_values(gradient)).all())
