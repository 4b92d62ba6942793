"""What one process alone knows, and all must decide on together at each optimizer step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...strategies import BALLOT_SIZE, Strategy, World

_WEIGHT, _STOP, _TAINT, _LEAVE, _SIGNAL = range(5)


class Agreement:
    """Sums each process's votes beside the gradients, without a collective of its own.

    A world of one answers at once. On accelerators the answer is read one step later, so that nothing waits for the
    device; ``immediate`` asks for it in the same step all the same.

    Attributes:
        stop_vote: this process wants to stop; set it at any time.
        stop: some process wanted to stop, and every process knows it now.
        finite: the losses of the step were finite on every process.
        leave_vote: this process wants to leave the epoch without this step.
        leaves: how many processes wanted that.
        signal_vote: this process got a signal that asks the run to end; see `signal`.
        signaled: some process got one, and every process knows it now.
    """

    def __init__(self, world: World, strategy: Strategy) -> None:
        self.stop_vote = False
        self.stop = False
        self.leave_vote = False
        self.leaves = 0
        self.signal_vote = False
        self.signaled = False
        self.finite = True
        self.local_finite = True
        self.watch_finite = True
        self.alone = world.size == 1
        self._world = world
        self.immediate = world.device.type == "cpu"
        self._device = world.device
        self._strategy = strategy
        self._taint: Tensor | None = None
        self._local_taint: Tensor | None = None
        self._pending: tuple[Tensor, Tensor, torch.cuda.Event | None] | None = None

    def signal(self) -> None:
        """This process got a signal that asks the run to end. May come at any time, from a signal handler."""
        self.signal_vote = True
        self.signaled |= self.alone

    def ask(self, stop: bool) -> bool:
        """Agree where no step carries votes, by an exchange; returns whether some process wants to stop."""
        self.stop, self.signaled = stop, self.signal_vote
        if not self.alone:
            votes = torch.tensor([stop, self.signal_vote], dtype=torch.int32)
            self.stop, self.signaled = map(bool, self._world.all_reduce(votes, "max").tolist())
        return self.stop

    def watch(self, loss: Tensor) -> None:
        """Take note of one micro-batch's loss."""
        if not self.watch_finite:
            return
        if self.alone and self.immediate:
            if not math.isfinite(loss.item()):
                self.local_finite = self.finite = False
            return
        taint = loss.detach().float() * 0.0  # 0 for a finite loss, NaN for any other: no host read
        self._taint = taint if self._taint is None else self._taint + taint

    def vote(self, weight: float | Tensor | None) -> None:
        """Cast this process's votes; called before the last backward of a step."""
        if self.alone:
            return
        votes = torch.zeros(BALLOT_SIZE, device=self._device)
        if weight is not None:
            votes[_WEIGHT] = weight
        if self.stop_vote:
            votes[_STOP] = 1.0
        if self.leave_vote:
            votes[_LEAVE] = 1.0
        if self.signal_vote:
            votes[_SIGNAL] = 1.0
        if self._taint is not None:
            votes[_TAINT] = self._taint
        self._local_taint, self._taint = self._taint, None
        self._strategy.start_agreement(votes)

    def count(self) -> Tensor | None:
        """Read the votes after that backward; returns the summed weight (on the device), or None in a world of one."""
        if self.alone:
            self.stop = self.stop_vote
            if not self.immediate and self.watch_finite:
                taint, self._taint = self._taint, None
                self._read_later(_pack_votes(None, taint, self._device))
            return None
        summed = self._strategy.agreement()
        packed = _pack_votes(summed, self._local_taint, self._device)
        if self.immediate:
            self._read(packed)
        else:
            self._read_later(packed)
        return summed[_WEIGHT]

    def _read(self, packed: Tensor) -> None:
        values = packed.tolist()
        if not self.alone:
            self.stop = values[_STOP] > 0
            self.leaves = round(values[_LEAVE])
            self.signaled = values[_SIGNAL] > 0
        self.finite = not math.isnan(values[_TAINT])
        self.local_finite = not math.isnan(values[-1])

    def settle(self) -> None:
        """Read at once what would be read one step later; waits for the device."""
        pending, self._pending = self._pending, None
        if pending is not None:
            _, host, event = pending
            if event is not None:
                event.synchronize()
            self._read(host)

    def _read_later(self, packed: Tensor) -> None:
        self.settle()
        event = None
        if packed.is_cuda:
            host = torch.empty(packed.shape, pin_memory=True)
            host.copy_(packed, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        else:
            host = packed
        self._pending = (packed, host, event)

    def forget_losses(self) -> None:
        """Forget the losses of a group that will not be finished."""
        self.finite = self.local_finite = True
        self._taint = None

    def reset(self) -> None:
        """Forget the votes of the run before."""
        self.forget_losses()
        self.stop_vote = self.stop = self.leave_vote = False
        self.signaled = self.signal_vote and self.alone  # a signal that came before the first step counts
        self.leaves = 0
        self._local_taint = self._pending = None


def _pack_votes(votes: Tensor | None, local_taint: Tensor | None, device: torch.device) -> Tensor:
    """The summed votes and this process's own taint, to be read at once; in a world of one they are the same."""
    taint = torch.zeros(1, device=device) if local_taint is None else local_taint.reshape(1)
    if votes is None:
        votes = torch.zeros(BALLOT_SIZE, device=device)
        votes[_TAINT] = taint[0]
    return torch.cat((votes.float(), taint))
