"""The data sources that users bring: each sample once, on one rank and on two, and resumed exactly or said not to be.

What is known of each is in `docs/data.md`.
"""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from support import sources_samples as samples
from support.interrupted_reads import read_epochs
from support.models import SGDTask
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, random_split
from treadle.engine import CombinedLoader

import treadle

STOP = 5
# Sources of which not each of 96 samples comes once in an epoch, by what they are.
OTHERWISE = {
    "stream by rank, uneven": 87,
    "sampler that looks at the rank, uneven": 87,
    "batch sampler that looks at the rank": 95,
    "list of batches by rank, uneven": {1: 96, 2: 92},
    "datasets stream, batched map": 48,
}
NEVER_EXACT = {"WebDataset, shuffle"}
# The samples' own fault: each worker draws a permutation of its own, in a plain loop too.
WITHOUT_WORKERS = {"stream, torch's generator"}


def interrupted(workers, folder, resume):
    """By source: the ids of each batch that counts, by epoch, and the warnings; with `resume` of the rest alone."""
    found = {}
    torch.set_num_threads(1)
    for name, make in samples.sources(folder).items():
        samples.seed(1003 if resume else 7)
        path = Path(folder, name.replace(" ", "-"))
        found[name] = read_epochs(lambda make=make: make(workers), to_ids, path, [STOP], resume)
    return found


def to_ids(batch):
    return [int(i) for i in np.atleast_1d(batch)]


def whole_and_rest(workers, folder):
    return [interrupted(workers, folder, resume) for resume in (None, STOP)]


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("world", "workers"),
    [
        pytest.param(1, 0, marks=pytest.mark.slow),
        pytest.param(1, 2, marks=pytest.mark.slow),
        (2, 0),
        pytest.param(2, 2, marks=pytest.mark.slow),
    ],
)
def test_each_sample_once_and_resumed_exactly_or_said(world, workers, tmp_path):
    samples.write_tars(tmp_path)
    whole, rest = zip(*run(whole_and_rest, world, workers, str(tmp_path), timeout=280), strict=True)
    for name in whole[0]:
        expected = OTHERWISE.get(name, samples.SAMPLES)
        expected = expected[world] if isinstance(expected, dict) else expected
        for epoch in (0, 1):
            ids = [i for rank in whole for batch in rank[name][0][epoch] for i in batch]
            if name in WITHOUT_WORKERS and workers:
                continue
            assert len(set(ids)) == expected, (name, epoch)
            assert len(ids) == (2 * expected if "batched map" in name else expected), (name, epoch)
        lengths = [len(rank[name][0][0]) for rank in whole]
        assert len(set(lengths)) == 1, (name, "the ranks took different numbers of steps", lengths)
        exact = all(w[name][0][1][STOP:] == r[name][0][0] for w, r in zip(whole, rest, strict=True))
        assert exact == (name not in NEVER_EXACT), name
        said = "cannot resume exactly" in whole[0][name][1] and "this resume is not exact" in rest[0][name][1]
        assert said == (not exact), (name, whole[0][name][1], rest[0][name][1])


# -- ranks with data of their own train as one process does ------------------------------------------------------------


class Rows(IterableDataset):
    """Rank 0's 11 rows and rank 1's 6; each is a number and its square."""

    counts = (11, 6)

    def __iter__(self):
        rank, _ = samples.rank_and_size()
        return ((torch.tensor([i + 20.0 * rank]) / 10, torch.tensor([float(i % 3)])) for i in range(self.counts[rank]))


def own_loader(kind):
    if kind == "stream":
        return DataLoader(Rows(), batch_size=2)
    rows = list(Rows())
    if kind == "sized":
        return DataLoader(rows, batch_size=2)
    return DataLoader(rows, batch_sampler=[list(range(len(rows)))[i : i + 2] for i in range(0, len(rows), 2)])


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 3, dtype=torch.float64), nn.Tanh(), nn.Linear(3, 1, dtype=torch.float64))


class Task(SGDTask):
    def __init__(self):
        super().__init__()
        self.net = model()
        self.batches = 0

    def training_step(self, batch):
        x, y = batch
        return ((self.net(x.double()) - y) ** 2).mean()

    def validation_step(self, batch):
        self.log("val", self.training_step(batch))


def by_trainer(kind, strategy, accumulate, folder):
    task = Task()
    trainer = make_trainer(
        devices=2,
        strategy=strategy,
        accumulate_grad_batches=accumulate,
        max_epochs=2,
        use_distributed_sampler=kind == "stream",  # of which the ranks' first batches tell that it is split
        default_root_dir=folder,
    )
    trainer.fit(task, own_loader(kind), own_loader(kind))
    weights = {n: w.full_tensor() if isinstance(w, DTensor) else w for n, w in task.named_parameters()}
    return trainer.global_step, trainer.callback_metrics["val"].item(), {n: w.tolist() for n, w in weights.items()}


def by_hand(accumulate):
    """One process; a step's batch is what both ranks hold in it."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rows = []
    for rank, count in enumerate(Rows.counts):
        rows.append([(torch.tensor([i + 20.0 * rank]) / 10, torch.tensor([float(i % 3)])) for i in range(count)])
    width = 2 * accumulate
    for _ in range(2):
        for start in range(0, max(Rows.counts), width):
            step = [row for rank in rows for row in rank[start : start + width]]
            x, y = (torch.stack(part).double() for part in zip(*step, strict=True))
            ((net(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    x, y = (torch.stack(part).double() for part in zip(*rows[0], *rows[1], strict=True))
    return ((net(x) - y) ** 2).mean().item(), {f"net.{n}": w.tolist() for n, w in net.state_dict().items()}


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("kind", "accumulate"),
    [pytest.param("stream", 1, marks=pytest.mark.exhaustive), ("stream", 4), ("sized", 4), ("batch sampler", 1)],
)
def test_uneven_ranks_train_as_one_process(kind, accumulate, strategy, tmp_path):
    metric, wanted = by_hand(accumulate)
    for steps, value, weights in run(by_trainer, 2, kind, strategy, accumulate, str(tmp_path)):
        assert steps == 2 * -(-6 // accumulate)
        assert value == pytest.approx(metric, abs=1e-6)  # metrics are exchanged in single precision
        for name, weight in wanted.items():
            torch.testing.assert_close(torch.tensor(weights[name]), torch.tensor(weight), atol=1e-12, rtol=0)


# -- what the ranks hold -----------------------------------------------------------------------------------------------


class SomeAlike(IterableDataset):
    """The same on ranks 0 and 1, another one on rank 2; or nothing at all on rank 1."""

    def __init__(self, empty=False):
        self.empty = empty

    def __iter__(self):
        rank, _ = samples.rank_and_size()
        return iter(range(0) if self.empty and rank else range(rank // 2 * 50 + (rank if self.empty else 0), 60))


def error_of(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def what_is_said():
    accelerator = treadle.Accelerator(cpu=True)

    def read(loader):
        return error_of(lambda: list(accelerator.prepare_data_loader(loader)))

    empty = DataLoader(SomeAlike(empty=True), batch_size=2)
    return {"alike": read(DataLoader(SomeAlike(), batch_size=2)), "empty": read(empty)}


def test_streams_that_can_not_be_trained_on_are_refused_on_every_rank():
    for rank in run(what_is_said, 3):
        assert "on ranks 0-1, but different batches on the other ranks, so it can neither" in rank["alike"]
        assert "yields no batch on ranks 1-2" in rank["empty"]


def drawn_after_the_first_loader():
    accelerator = treadle.Accelerator(cpu=True)
    train = accelerator.prepare(DataLoader(range(8), batch_size=2))
    split = list(random_split(range(40), [20, 20])[0])  # nobody has seeded anything
    noise = [torch.rand(()).item() for _ in train]
    own = random_split(TensorDataset(torch.arange(40.0)), [20, 20])[0]
    return split, noise, error_of(lambda: accelerator.prepare(DataLoader(own, batch_size=2)))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What two ranks found, and their folder: one start for all of it."""
    folder = tmp_path_factory.mktemp("two")
    return run(read_in_turn, 2, folder), folder


@pytest.mark.long
def test_what_a_script_draws_before_its_loop_is_the_same_on_all_ranks(two_ranks):
    (one, first, _), (two, second, error) = (found["drawn"] for found in two_ranks[0])
    assert one == two
    assert not set(first) & set(second)  # in the loop each draws numbers of its own
    assert "datasets on the ranks contain different data" in error


class MadeAnew(Task):
    """Asks for other random data in each epoch, which nobody has seeded."""

    def train_dataloader(self):
        self.made = torch.randn(8, 1)
        return DataLoader(TensorDataset(self.made, self.made), batch_size=2)

    def on_train_epoch_start(self):
        self.seen = [*getattr(self, "seen", []), self.made.flatten().tolist()]


def made_in_hooks(folder):
    task = MadeAnew()
    trainer = make_trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1, default_root_dir=folder)
    trainer.fit(task)
    return trainer.global_step, task.seen


def test_data_that_hooks_make_anew_is_the_same_on_all_ranks(two_ranks):
    first, second = (found["made"] for found in two_ranks[0])
    assert first[0] == second[0]
    assert first[1][1:] == second[1][1:]  # the first is made before the ranks know of each other's random state
    assert len({str(epoch) for epoch in first[1]}) == 3


def resumed_elsewhere(folder, save):
    accelerator = treadle.Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(samples.ByRank(), batch_size=2))
    if save:
        for number, _ in enumerate(loader):
            if number == 7:
                accelerator.save_state(folder)
                return None
    with warnings.catch_warnings(record=True, action="always") as caught:
        accelerator.load_state(folder)
        ids = [int(i) for batch in loader if accelerator.cursor.micro.samples for i in batch]
    return ids, "\n".join(str(each.message) for each in caught)


def test_a_stream_of_each_ranks_own_on_another_number_of_ranks(two_ranks):
    ids, said = resumed_elsewhere(two_ranks[1] / "elsewhere", False)
    assert "exact only if the stream assigns single samples to the ranks in turn" in said
    assert ids == list(range(32, 96))  # as this one is


def saved_at_the_end_of_one_ranks_data(folder, resume):
    accelerator = treadle.Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(samples.Knowing(lost=95 - 4 * 5), batch_size=2))  # 11 and 10 samples
    if resume:
        accelerator.load_state(folder)
    read = []
    for batch in loader:
        read.append([int(i) for i in batch] if accelerator.cursor.micro.samples else [])
        if not resume and len(read) == 5:  # rank 1 has read all
            accelerator.save_state(folder)
    return read


def test_resume_where_one_ranks_data_ends(two_ranks):
    whole, rest = zip(*(found["end"] for found in two_ranks[0]), strict=True)
    assert rest == tuple(read[5:] for read in whole)
    assert [len(read) for read in whole] == [6, 6]
    assert whole[1][5] == []


def combined(mode):
    accelerator = treadle.Accelerator(cpu=True)
    own = DataLoader(samples.ByRank(lost=9), batch_size=4)
    shared = DataLoader(range(30), batch_size=4)
    seen = [[], []]
    for rows in accelerator.prepare(CombinedLoader([own, shared], mode)):
        for ids, batch in zip(seen, rows, strict=True):
            ids.append([] if batch is None else batch.tolist())
    return seen


MODES = {"min_size": 4, "max_size": 11, "max_size_cycle": 11}


def read_in_turn(folder):
    found = {"drawn": drawn_after_the_first_loader(), "made": made_in_hooks(folder)}
    resumed_elsewhere(folder / "elsewhere", True)
    found["end"] = [saved_at_the_end_of_one_ranks_data(folder / "end", resume) for resume in (False, True)]
    return found | {mode: combined(mode) for mode in MODES}


@pytest.mark.parametrize("mode", MODES)
def test_ranks_own_data_combined_with_shared_data(two_ranks, mode):
    ranks, steps = [found[mode] for found in two_ranks[0]], MODES[mode]
    assert [len(part) for rank in ranks for part in rank] == [steps] * 4
    own = {i for own, _ in ranks for batch in own for i in batch}
    shared = {i for _, shared in ranks for batch in shared for i in batch}
    assert own == set(range(87 if steps == 11 else 32))
    assert shared == set(range(30))
