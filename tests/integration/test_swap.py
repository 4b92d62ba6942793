"""Scripts as people publish them for Lightning, with nothing but their imports changed: the same numbers.

`tests/swap` has the scripts, `swapped.py` what is changed in them, `recorded.json` what Lightning produced
(`benchmarks/swap.py --record`, which also runs both beside each other). Everything that a script finds is compared, but
for what the tests name one by one: there Lightning is otherwise, and a row of docs/differences says why.
"""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from support import swapped
from support.differences import differences
from support.house import read_differences
from support.models import SGDTask
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

import treadle

TOLERANCE = 1e-5  # relative: half of the scripts compute in float32, and another torch may round otherwise
RECORDED = json.loads(swapped.RECORDED.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def nothing_is_left():
    """The scripts seed everything, and ask for deterministic algorithms."""
    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.set_rng_state(kept[0]), np.random.set_state(kept[1]), random.setstate(kept[2])


def both(name, folder):
    """What a run finds here, and what Lightning found."""
    recorded = RECORDED["runs"][name]
    assert recorded["arguments"] == list(swapped.RUNS[name])
    return swapped.execute(name, "treadle", folder), recorded["results"]


def assert_same(ours, theirs):
    assert differences(ours, theirs, TOLERANCE) == []


def test_only_import_lines_are_changed():
    scripts = sorted(swapped.FOLDER.glob("*.py"))
    for path in [*scripts, *sorted(swapped.PROGRAMS.glob("*.py"))]:
        before = path.read_text(encoding="utf-8")
        after = swapped.swapped(before)
        pairs = [(a, b) for a, b in zip(before.splitlines(), after.splitlines(), strict=True) if a != b]
        assert len(pairs) >= (3 if path in scripts else 1)
        assert all(a.startswith(("import lightning", "from lightning")) for a, _ in pairs)
        assert "lightning" not in "".join(b for _, b in pairs)
        assert before.count("\nimport lightning") + before.count("\nfrom lightning") == len(pairs)


def test_classifier(tmp_path):
    ours, theirs = both("classifier", tmp_path)
    assert len(theirs["losses"]) == 112 < 12 * 16  # it stopped early, as here
    our_curves, their_curves = ours.pop("curves"), theirs.pop("curves")
    assert_same(ours, theirs)

    # Two rows of "Steps and schedules": a step's number; and the plateau scheduler's moment, which is after the hook
    # on_train_epoch_end there and after validation here, so that hook sees another rate.
    assert our_curves.keys() == their_curves.keys()
    shifted = {"train_loss_step", "train_loss_epoch", "train_acc", "grad_norm", "epoch_lr", "hp/channels"}
    for name, curve in our_curves.items():
        validated = name.startswith("val_")  # one more at the end, by trainer.validate
        steps = [step for step, _ in curve][: -1 if validated else None]
        wanted = [step + (name in shifted or validated) for step, _ in their_curves[name]][: -1 if validated else None]
        assert steps == wanted, name
        if name != "epoch_lr":
            assert_same([value for _, value in curve], [value for _, value in their_curves[name]])
    rates, their_rates = ([value for _, value in curves["epoch_lr"]] for curves in (our_curves, their_curves))
    assert_same(rates[:-1], their_rates[1:])


@pytest.mark.exhaustive
def test_transformer(tmp_path):
    ours, theirs = both("transformer", tmp_path)
    assert len(theirs["losses"]) == 80
    # "The loss in on_train_batch_end": what training_step returned, not a fourth of it.
    outputs = ours.pop("outputs")
    assert_same(outputs, [4 * loss for loss in theirs.pop("outputs")])
    assert_same(outputs, ours["losses"])
    assert_same(ours, theirs)


@pytest.mark.exhaustive
def test_partial_groups(tmp_path):
    """ "Last group of an epoch": ten batches by four leave two, whose gradient Lightning divides by four."""
    ours, theirs = both("transformer, partial groups", tmp_path)
    assert_same(ours["losses"][:10], theirs["losses"][:10])
    (mine, norms) = (result["metrics"]["norms"] for result in (ours, theirs))
    assert_same(mine[:2], norms[:2])
    assert mine[2] == pytest.approx(2 * norms[2], rel=TOLERANCE)
    assert ours["losses"][10] != pytest.approx(theirs["losses"][10], rel=1e-4)
    assert_same(ours["metrics"]["rates"], theirs["metrics"]["rates"])
    assert ours["facts"]["global_steps"] == theirs["facts"]["global_steps"]


def test_several_epochs(tmp_path):
    """ "A loader with a generator of its own": the second epoch's order, see the next test."""
    ours, theirs = both("transformer, several epochs", tmp_path)
    assert_same(ours["losses"][:8], theirs["losses"][:8])
    assert_same(ours["metrics"]["validations"][0], theirs["metrics"]["validations"][0])
    assert ours["losses"][8] != pytest.approx(theirs["losses"][8], rel=1e-4)


class Noisy(SGDTask):
    """Notes its samples, and draws random numbers as dropout does."""

    def __init__(self, draws):
        super().__init__()
        self.net, self.draws, self.seen, self.drawn = nn.Linear(1, 1), draws, [], []

    def training_step(self, batch, batch_idx):
        self.seen += batch.flatten().tolist()
        if self.draws:
            self.drawn.append(torch.rand(()).item())
        return self.net(batch).mean()

    def validation_step(self, batch, batch_idx):
        pass


class Augmented(Dataset):
    """Sample by sample a number, changed at random."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([index + torch.rand(()).item() / 2])


class Permuted(Sampler):
    """Draws its order with the first index."""

    def __len__(self):
        return 8

    def __iter__(self):
        yield from torch.randperm(8).tolist()


class Stream(IterableDataset):
    """Draws for each sample, as a shuffle buffer does."""

    def __iter__(self):
        return (torch.tensor([index + torch.rand(()).item() / 2]) for index in range(8))


def numbers(**options):
    return DataLoader(torch.arange(8.0)[:, None], 2, shuffle=True, **options)


LOADERS = {
    "shuffled": numbers,
    "generator": lambda: numbers(generator=torch.Generator().manual_seed(3)),
    "augmented": lambda: DataLoader(Augmented(), 2, shuffle=True),
    "sampler": lambda: DataLoader(Augmented(), 2, sampler=Permuted()),
    "workers": lambda: numbers(num_workers=1),
    "stream": lambda: DataLoader(Stream(), 2),
}


def train_noisy(name, draws, how):
    """What a task sees and draws in three epochs, and what the process draws after them."""
    torch.manual_seed(1)
    task, train, val = Noisy(draws), LOADERS[name](), DataLoader(torch.arange(4.0)[:, None], 2)
    if how == "Trainer":
        make_trainer(max_epochs=3).fit(task, train, val)
    else:
        if how == "Accelerator":
            train, val = treadle.Accelerator(cpu=True).prepare(train, val)
        for _ in range(3):
            for batch in train:
                task.training_step(batch, 0)
            list(val)
    return task.seen, task.drawn, torch.rand(()).item()


@pytest.mark.long
@pytest.mark.parametrize("how", ["Trainer", "Accelerator"])
@pytest.mark.parametrize("name", LOADERS)
def test_one_process_draws_what_a_plain_loop_draws(name, how):
    """Order, augmentation and dropout are drawn from one state, one after the other."""
    assert train_noisy(name, False, how) == train_noisy(name, False, "by hand")
    drawn, by_hand = train_noisy(name, True, how), train_noisy(name, True, "by hand")
    if name == "stream":  # which is read from a copy of the state, so that a resume can read it again
        assert drawn != by_hand
    else:
        assert drawn == by_hand


def distributed(folder):
    return swapped.execute("distributed", "treadle", Path(folder))


@pytest.mark.long
def test_two_processes(tmp_path):
    """With a sampler of one's own: else Lightning shuffles, and pads, whatever the loader says."""
    theirs = RECORDED["runs"]["distributed"]["results"]
    assert len(theirs["losses"]) == 24
    for ours in run(distributed, 2, str(tmp_path)):
        assert_same(ours, theirs)


def test_evaluation(tmp_path):
    ours, theirs = both("evaluation", tmp_path)
    assert len(theirs["losses"]) == 40

    # "The last, short batches of multiple loaders": here a value weighs the samples in all parts of its batch, 32 or
    # 26, there those of the first part, 16.
    noisy, their_noisy = (result["metrics"]["epoch"].pop("train/noisy") for result in (ours, theirs))
    assert noisy != pytest.approx(their_noisy, rel=1e-5)
    assert noisy == pytest.approx(their_noisy, rel=1e-2)
    # "The state of callbacks after test": there a ModelCheckpoint names a file that is gone.
    assert (ours.pop("path_after_test_exists"), theirs.pop("path_after_test_exists")) == (True, False)
    # "Names logged with `add_dataloader_idx=False`": here each dict has them, there only the dict of their loader.
    for stage in ("test", "validate"):
        for mine, found in zip(ours["metrics"][stage], theirs["metrics"][stage], strict=True):
            for name in mine.keys() - found.keys():
                assert "dataloader_idx" not in name
                del mine[name]
    assert_same(ours, theirs)


# What is otherwise in the programs' results: where, and the first cell of the row of docs/differences that says why.
OTHERWISE = {
    "coefficients": ("/validated/", "Names logged with `add_dataloader_idx=False`"),
    "hydra_template": ("/rate", "`trainer.optimizers` after `test`"),
}


LONG = ("hydra_template", "potentials", "variational")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive if name in LONG else ()) for name in swapped.list_programs()],
)
def test_programs_of_public_shapes(name, tmp_path):
    """Small programs of the shapes that public code has; `swap/programs/README.md` lists the sources."""
    (tmp_path / "run").mkdir()
    ours = swapped.execute_program(name, "treadle", tmp_path)
    differing = differences(ours, RECORDED["programs"][name], TOLERANCE)
    place, row = OTHERWISE.get(name, ("nowhere", ""))
    assert [one for one in differing if not one[0].startswith(place)] == []
    if row:
        assert differing, f"{name} is the same now: drop its line of OTHERWISE"
        assert f"| {row}" in read_differences()


def test_every_program_names_its_source():
    table = (swapped.PROGRAMS / "README.md").read_text(encoding="utf-8")
    names = swapped.list_programs()
    assert len(names) >= 20
    assert [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")] == names
