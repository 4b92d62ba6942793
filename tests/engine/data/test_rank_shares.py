"""Ranks that read streams of their own vote on the end beside their gradients: the same training, no exchange."""

import os
from types import SimpleNamespace

import pytest
import torch
from support.models import SGDTask
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset
from treadle.callbacks import Callback
from treadle.engine.data import loader as loaders
from treadle.engine.data import rank_shares
from treadle.engine.data.rank_shares import Outlook
from treadle.engine.data.streamed_batches import holds_model

import treadle

LENGTHS = (23, 14)  # samples of rank 0 and of rank 1


class Numbers(IterableDataset):
    """Samples of this rank alone; writes down which it has made."""

    def __init__(self, lengths=LENGTHS):
        self.count = lengths[int(os.environ["RANK"])]
        self.made = 0

    def __iter__(self):
        for number in range(self.count):
            self.made = number + 1
            yield torch.tensor([number / 10 + 3 * int(os.environ["RANK"])], dtype=torch.float64)


class Task(SGDTask):
    """Writes down which samples count in each micro-batch."""

    def __init__(self, manual=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        self.seen = []
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        counts = self.trainer.accelerator.cursor.micro.samples
        self.seen.append(batch.flatten().tolist()[:counts])
        loss = (self.net(batch.double().reshape(-1, 1)) ** 2).mean()
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        self.optimizers().step()
        self.optimizers().zero_grad()
        return None


def counted_exchanges(monkeypatch):
    """Returns a list that grows with each sum of samples over the hosts."""
    exchanges, plain = [], rank_shares.RankShares._exchange

    def exchange(*args):
        exchanges.append(args)
        return plain(*args)

    monkeypatch.setattr(rank_shares.RankShares, "_exchange", staticmethod(exchange))
    return exchanges


def read_one_step_later(monkeypatch):
    """As on a GPU: votes are known when those of the next step are read, so two groups are read ahead."""
    waiting, plain, exchange = [], Outlook.store_votes, rank_shares.RankShares.exchange_lengths

    def agree_on_two(shares, *args):
        exchange(shares, *args)
        shares.depth *= 2

    def store_votes(*votes):
        waiting.append(votes)
        if len(waiting) > 1:
            plain(*waiting.pop(0))

    monkeypatch.setattr(Outlook, "store_votes", store_votes)
    monkeypatch.setattr(rank_shares.RankShares, "exchange_lengths", agree_on_two)


def fit(depth, strategy, accumulate, lengths, workers, **flags):
    """Fits once; `depth` is how many groups of micro-batches are read ahead."""
    with pytest.MonkeyPatch.context() as patch:
        exchanges = counted_exchanges(patch)
        if depth == 0:
            patch.setattr(loaders, "may_read_ahead", lambda *_: False)
        if depth == 2:
            read_one_step_later(patch)
        task = Task(flags.pop("manual", False))
        own = make_trainer(
            devices=2, strategy=strategy, precision="64-true", accumulate_grad_batches=accumulate,
            **{"max_epochs": 2, **flags},
        )  # fmt: skip
        own.fit(task, DataLoader(Numbers(lengths), 2, num_workers=workers))
    weights = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in task.named_parameters()}
    return task.seen, own.global_step, own.progress.samples, weights, len(exchanges)


def compare(strategy, accumulate, lengths, workers, depth, flags):
    arguments = strategy, accumulate, lengths, workers
    return fit(0, *arguments, **flags), fit(depth, *arguments, **flags)


# By name: strategy, micro-batches per step, samples of each rank, workers, groups read ahead, exchanges of two epochs.
CASES = {
    # Of 12 and 7 batches: the first step of an epoch, and the one in which rank 0 has a short batch.
    "ddp": ("ddp", 1, LENGTHS, 0, 1, 4, {}),
    "workers": ("ddp", 1, LENGTHS, 1, 1, 4, {}),
    "fsdp": ("fsdp", 1, LENGTHS, 0, 1, 4, {}),
    # The first of 6 steps, that with rank 1's single last batch, and rank 0's last.
    "accumulated": ("ddp", 2, LENGTHS, 0, 1, 6, {}),
    # As where votes are read one step later: the first two.
    "later": ("ddp", 1, LENGTHS, 0, 2, 6, {}),
    # All full and of one length: nobody knows before the end that it is the end.
    "even": ("ddp", 1, (16, 16), 0, 1, 2, {}),
    "limited": ("ddp", 1, LENGTHS, 0, 1, 2, {"limit_train_batches": 5}),
    "manual": ("ddp", 1, LENGTHS, 0, 1, 4, {"manual": True}),
}


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.exhaustive if case in ("workers", "fsdp", "later", "limited") else ())
        for case in CASES
    ],
)
def test_the_training_is_that_of_ranks_that_exchange_their_samples(case):
    strategy, accumulate, lengths, workers, depth, expected, flags = CASES[case]
    ranks = run(compare, 2, strategy, accumulate, lengths, workers, depth, flags)
    for exchanging, voting in ranks:
        assert voting[:3] == exchanging[:3]
        for name, value in exchanging[3].items():
            assert torch.equal(voting[3][name], value), name
        steps = exchanging[1]
        assert exchanging[4] >= steps
        assert voting[4] == expected
    seen = [number for (whole, *_), _ in ranks for batch in whole for number in batch]
    if "limit_train_batches" not in flags:
        assert len(seen) == 2 * sum(lengths)


class Widening(Callback):
    """The third step is made of two micro-batches, and so are those from the sixth to the eighth."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.accelerator.gradient_accumulation_steps = 2 if batch_idx == 1 or 5 <= batch_idx <= 9 else 1


def widen(lengths):
    return [fit(depth, "ddp", 1, lengths, 0, callbacks=[Widening()], max_epochs=1) for depth in (0, 1, 2)]


@pytest.mark.long
@pytest.mark.parametrize("short", [9, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (11, 13)), 15])
def test_a_step_may_take_more_micro_batches_than_were_read_ahead(short):
    for exchanging, *voting in run(widen, 2, (24, short)):
        for fitted in voting:
            assert fitted[:3] == exchanging[:3]
            assert all(torch.equal(fitted[3][name], value) for name, value in exchanging[3].items())
            assert fitted[4] < exchanging[4]


class Played(Numbers):
    """Samples that a model makes."""

    def __init__(self, model):
        super().__init__()
        self.play = model.forward


class Saved(Numbers):
    """Has a state of the user's own."""

    def state_dict(self):
        return {"made": self.made}

    def load_state_dict(self, state):
        self.made = state["made"]


def made_before_each_step(kind):
    """How many samples the stream has made when each of the first three steps begins."""
    dataset = {"plain": Numbers, "saved": Saved, "played": lambda: Played(nn.Linear(1, 1))}[kind]()
    task, made = Task(), []
    task.on_train_batch_start = lambda batch, batch_idx: made.append(dataset.made)
    make_trainer(devices=2, strategy="ddp", precision="64-true").fit(task, DataLoader(dataset, 2))
    return made[:3]


def made_in_turn(kinds):
    return [made_before_each_step(kind) for kind in kinds]


@pytest.mark.long
def test_samples_that_may_follow_from_the_training_are_read_when_they_are_due():
    assert run(made_in_turn, 2, ["plain", "saved", "played"]) == [[[4, 6, 8], [2, 4, 6], [2, 4, 6]]] * 2


def test_what_a_model_makes_is_found():
    model = nn.Linear(1, 1)

    class Agent:
        def __init__(self):
            self.net = model

        def act(self):
            return self.net

    def stream(**attributes):
        dataset = object.__new__(Numbers)
        vars(dataset).update(attributes)
        return dataset

    for value in (
        model,
        model.forward,
        Agent().act,
        SimpleNamespace(agents=[Agent()]),
        lambda: model(1),
        [1, {"net": model}],
    ):
        assert holds_model(stream(value=value))
    for value in (3, torch.ones(2), torch.nn.functional, nn.Linear, [model] * 200, len, lambda: stream):
        assert not holds_model(stream(value=value))


def own_loop(weighted):
    """Whether votes replaced exchanges in a loop of the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        exchanges = counted_exchanges(patch)
        torch.manual_seed(0)
        accelerator = treadle.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = nn.Linear(1, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Numbers(), 2))
        for batch in loader:
            with accelerator.accumulate(model):
                weight = len(batch) if weighted else None
                accelerator.backward((model(batch) ** 2).mean(), weight=weight)
                optimizer.step()
                optimizer.zero_grad()
    return len(exchanges), model(torch.ones(1, 1, dtype=torch.float64)).item()


def own_loops():
    return own_loop(True), own_loop(False)


def test_an_own_loop_votes_where_it_reports_weights():
    for (voting, result), (exchanging, same_result) in run(own_loops, 2):
        assert voting == 3
        assert exchanging == 7
        assert result == pytest.approx(same_result, abs=1e-12)
