"""Prepared schedulers: sized by the loader as the script wrote it, advanced by every process's batch."""

import math
import warnings
from functools import partial

import pytest
import torch
from support.processes import run
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)
from torch.utils.data import DataLoader

import treadle
from treadle.utils import DataLoaderConfiguration, GradientAccumulationPlugin, ParallelismConfig

SAMPLES = 48


def sgd(lr=1.0):
    return torch.optim.SGD([nn.Parameter(torch.ones(()))], lr=lr)


def prepare(make, **options):
    """An Accelerator, and what it prepared: an optimizer and its scheduler."""
    accelerator, optimizer = treadle.Accelerator(cpu=True, **options), sgd()
    return accelerator, *accelerator.prepare(optimizer, make(optimizer))


def linear_decay(optimizer, steps):
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))


def training(make, batch_size, **options):
    """A script's set-up: the schedule is sized by the loader before it is prepared."""
    accelerator = treadle.Accelerator(cpu=True, **options)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    loader = DataLoader(torch.arange(float(SAMPLES)).view(-1, 1), batch_size=batch_size)
    steps = math.ceil(len(loader) / accelerator.gradient_accumulation_steps)
    return accelerator, *accelerator.prepare(model, optimizer, loader, make(optimizer, 2 * steps))


def trained(accelerator, model, optimizer, loader, scheduler, stop=None):
    """The rate after each optimizer step of up to two epochs."""
    rates = []
    while loader.epoch < 2:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                rates.append(optimizer.param_groups[0]["lr"])
            if len(rates) == stop:
                return rates
    return rates


def decays(batch_size, accumulate):
    plain = trained(*training(linear_decay, batch_size, gradient_accumulation_steps=accumulate))
    # The group's size as a plugin; adjust_scheduler has no effect, as in Accelerate.
    plugin = GradientAccumulationPlugin(num_steps=accumulate, adjust_scheduler=False)
    assert trained(*training(linear_decay, batch_size, gradient_accumulation_plugin=plugin)) == plain
    return plain


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_decay_ends_at_zero_on_any_number_of_processes(two_ranks, accumulate):
    alone = decays(4, accumulate)
    pair, other = (found["decays"][accumulate] for found in two_ranks)
    assert pair == other
    assert pair == alone[1::2]  # after as many samples, the same rate
    assert alone[-1] == pair[-1] == 0.0


def split():
    accelerator, *parts = training(linear_decay, 8, dataloader_config=DataLoaderConfiguration(split_batches=True))
    return trained(accelerator, *parts)


def test_with_split_batches_each_step_counts_once(two_ranks):
    alone, pair = split(), [found["split"] for found in two_ranks]
    assert len(alone) == 12
    assert pair == [alone, alone]


def tensor_parallel():
    accelerator = treadle.Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    return accelerator.prepare_scheduler(StepLR(sgd(), 1)).advances


def test_processes_that_share_a_batch_count_once(two_ranks):
    assert [found["tensor parallel"] for found in two_ranks] == [1, 1]


def plateau():
    _, optimizer, scheduler = prepare(lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0))
    rates = []
    for metric in (4.0, 3.0, 2.0, 2.5, 2.6):
        optimizer.step()
        scheduler.step(metric)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_a_metric_is_told_once(two_ranks):
    assert [plateau(), *(found["plateau"] for found in two_ranks)] == [[1.0, 1.0, 1.0, 0.5, 0.25]] * 3


def by_epoch(**options):
    accelerator, optimizer, scheduler = prepare(lambda optimizer: StepLR(optimizer, 1, 0.5), **options)
    assert accelerator.prepare(scheduler.scheduler) is scheduler
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with accelerator.accumulate():
                optimizer.step(), optimizer.step(), optimizer.step()
                scheduler.step()
    said = [str(one.message) for one in caught if "StepLR" in str(one.message)]
    return said, optimizer.param_groups[0]["lr"]


def both_by_epoch():
    return by_epoch(), by_epoch(step_scheduler_with_optimizer=False, gradient_accumulation_steps=2)


def test_a_schedule_that_counts_epochs_is_told_how_to(two_ranks):
    assert both_by_epoch() == (([], 0.25), ([], 0.25))
    (prepared, plain), (silent, _) = (found["by epoch"] for found in two_ranks)
    assert plain == ([], 0.25)
    assert prepared[1] == 0.5**4  # as Accelerate's
    (said,) = prepared[0]
    for words in ("after 3 optimizer steps", "2 per call", "2 times too fast", "step_scheduler_with_optimizer=False"):
        assert words in said
    assert silent[0] == []  # rank zero has said it


def one_cycle(total):
    _, optimizer, scheduler = prepare(lambda optimizer: OneCycleLR(optimizer, 1.0, total_steps=total))
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    return scheduler.last_epoch


def several():
    found = {
        "decays": {accumulate: decays(4, accumulate) for accumulate in (1, 2)},
        "split": split(),
        "plateau": plateau(),
        "by epoch": both_by_epoch(),
        "tensor parallel": tensor_parallel(),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return {**found, "one cycle": one_cycle(9)}


@pytest.fixture(scope="module")
def two_ranks():
    return run(several, 2)


def test_one_cycle_may_end_within_a_step_but_is_not_left_silently(two_ranks):
    assert [found["one cycle"] for found in two_ranks] == [9, 9]
    with pytest.warns(UserWarning, match=r"OneCycleLR has reached total_steps=3; the learning rate stays .* Increase"):
        assert one_cycle(3) == 3


# -- going on with another number of processes -----------------------------------------------------------------------


SCHEDULES = {
    "functions of the loader's length": linear_decay,
    "functions of nothing": lambda optimizer, _: LambdaLR(optimizer, lambda step: 0.9**step),
    "a length that is saved": lambda optimizer, steps: CosineAnnealingLR(optimizer, T_max=steps),
    "a length in steps": lambda optimizer, _: StepLR(optimizer, 3, 0.5),
    "products": lambda optimizer, _: MultiplicativeLR(optimizer, lambda step: 0.95),
    "a short warm-up": lambda optimizer, steps: LinearLR(optimizer, 0.1, total_iters=steps // 2),
}


def started(name, folder, batch_size, accumulate, stop=None, resumed=False):
    accelerator, *parts = training(SCHEDULES[name], batch_size, gradient_accumulation_steps=accumulate)
    if resumed:
        accelerator.load_state(folder / name)
    rates = trained(accelerator, *parts, stop=stop)
    if stop is not None:
        accelerator.save_state(folder / name)
    return rates


def start_every(*arguments):
    return {name: started(name, *arguments) for name in SCHEDULES}


def whole_and_begun(*arguments):
    return start_every(*arguments), start_every(*arguments, 5)


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 4, 1), (1, 8, 1)),
        pytest.param((1, 8, 1), (2, 4, 1), marks=pytest.mark.exhaustive),
        pytest.param((2, 4, 1), (1, 4, 2), marks=pytest.mark.exhaustive),
    ],
)
def test_the_same_global_batch_on_another_number_of_processes_has_the_same_rates(before, after, tmp_path):
    whole, begun = run(whole_and_begun, before[0], tmp_path, *before[1:])[0]
    ended = run(start_every, after[0], tmp_path, *after[1:], None, True)[0]
    for name, rates in whole.items():
        assert rates[:5] == begun[name]
        assert begun[name] + ended[name] == pytest.approx(rates, rel=1e-9, abs=1e-12), name


@pytest.mark.guarantee
def test_the_same_batch_per_process_follows_the_samples(tmp_path):
    arguments = "functions of the loader's length", tmp_path, 4, 1
    alone = trained(*training(linear_decay, 4))
    begun = run(started, 2, *arguments, 5)[0]
    with pytest.warns(UserWarning, match="global batch of 8 .* this run has 4"):
        ended = started(*arguments, resumed=True)
    assert begun == alone[1:10:2]
    assert ended == alone[10:]


def test_it_knows_its_optimizer():
    """Scripts read the rate, or what else is in the groups, through ``scheduler.optimizers[-1].param_groups``."""
    accelerator = treadle.Accelerator(cpu=True)
    first, second = sgd(1.0), sgd(2.0)
    first, second, scheduler = accelerator.prepare(first, second, StepLR(second, 1, 0.5))
    assert scheduler.optimizers == [second]
    second.step()
    scheduler.step()
    assert scheduler.optimizers[-1].param_groups[0]["lr"] == 1.0
    assert first.param_groups[0]["lr"] == 1.0


def halved(get_lr):
    return [rate / 2 for rate in get_lr()]


def with_a_function(optimizer):
    scheduler = StepLR(optimizer, 2, gamma=0.1)
    scheduler.get_lr = partial(halved, scheduler.get_lr)
    return scheduler


def test_functions_in_a_state_are_left_out_with_one_warning_and_those_of_the_new_scheduler_are_kept(tmp_path):
    accelerator, optimizer, scheduler = prepare(with_a_function)
    optimizer.step()
    scheduler.step()
    with pytest.warns(UserWarning, match=r"StepLR contains functions, which are not saved: get_lr\."):
        accelerator.save_state(tmp_path / "one")
    with warnings.catch_warnings(record=True) as warned:
        accelerator.save_state(tmp_path / "two")
    assert not [w for w in warned if "contains functions" in str(w.message)]
    other, optimizer, resumed = prepare(with_a_function)
    own = resumed.scheduler.get_lr
    other.load_state(tmp_path / "two")
    assert resumed.scheduler.get_lr is own
    assert (resumed.scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (1, 0.5)
    optimizer.step()
    resumed.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
