"""Batches by budget: as large as it allows, the same steps on any number of ranks, resumed exactly."""

import itertools
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models import SGDTask
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader

import treadle
from treadle.data import BudgetBatchSampler

LENGTHS = np.random.default_rng(0).integers(1, 40, 90)
COSTS = {
    "padded": lambda lengths: len(lengths) * max(lengths),
    "sum": sum,
    "attention": lambda lengths: sum(float(n) ** 2 for n in lengths),
}


def take(sampler, epoch):
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(sampler) == len(batches)
    return batches


@pytest.mark.parametrize(("cost", "budget"), [("padded", 120), ("sum", 150), ("attention", 4000)])
def test_batches_are_as_large_as_the_budget_allows(cost, budget):
    compute = COSTS[cost]
    sampler = BudgetBatchSampler(LENGTHS, budget, cost=compute if cost == "attention" else cost, buckets=8)
    epochs = [take(sampler, epoch) for epoch in range(6)]
    for batches in epochs:
        assert sorted(itertools.chain(*batches)) == list(range(len(LENGTHS)))
        assert all(compute(LENGTHS[batch]) <= budget for batch in batches)
        # In the order in which they were composed, each has no space for the first sample of the next one.
        composed = sorted(batches, key=lambda batch: np.mean(sampler._bucket[batch]))
        full = [compute(LENGTHS[[*batch, following[0]]]) > budget for batch, following in itertools.pairwise(composed)]
        assert sum(full) >= len(full) - 2  # batches of one bucket have no order that shows
    assert len({str(batches) for batches in epochs}) == 6
    assert len({len(batches) for batches in epochs}) > 1 or cost != "padded"
    assert take(BudgetBatchSampler(LENGTHS, budget, cost=sampler._cost, buckets=8), 3) == epochs[3]
    other = BudgetBatchSampler(LENGTHS, budget, cost=sampler._cost, buckets=8, seed=1)
    assert take(other, 3) != epochs[3]
    other.load_state_dict(sampler.state_dict())
    assert list(other) == epochs[5]


def test_small_types_do_not_overflow():
    lengths = np.full(300, 200, dtype=np.uint8)
    assert [len(batch) for batch in BudgetBatchSampler(lengths, 20_000)] == [100] * 3
    assert BudgetBatchSampler(torch.tensor(lengths), 20_000).total == 60_000


def test_buckets_save_padding():
    def padding(**options):
        batches = list(BudgetBatchSampler(LENGTHS, 120, **options))
        return sum(COSTS["padded"](LENGTHS[batch]) for batch in batches)

    assert padding(buckets=1) > 1.25 * padding(buckets=8)
    assert padding(buckets=8) > padding(buckets=90)
    in_order = list(BudgetBatchSampler(LENGTHS, 120, shuffle=False))
    lengths = [LENGTHS[index] for batch in in_order for index in batch]
    assert lengths == sorted(lengths)


def test_the_last_batch_is_dropped_if_it_has_space():
    options = {"cost": "sum", "shuffle": False}
    assert [len(b) for b in BudgetBatchSampler([1] * 10, 4, **options)] == [4, 4, 2]
    assert [len(b) for b in BudgetBatchSampler([1] * 10, 4, drop_last=True, **options)] == [4, 4]
    assert [len(b) for b in BudgetBatchSampler([1] * 8, 4, drop_last=True, **options)] == [4, 4]


def test_a_sample_over_the_budget_is_named_or_alone():
    lengths = [3, 12, 5, 11]
    with pytest.raises(ValueError, match=r"sample 1 of length 12 costs 12, more than budget=10 \(1 other sample t"):
        BudgetBatchSampler(lengths, 10)
    with pytest.raises(ValueError, match=r"sample 1 .* costs 144, more than budget=130. Increase .* least 144"):
        BudgetBatchSampler(lengths, 130, cost=COSTS["attention"])
    batches = list(BudgetBatchSampler(lengths, 10, oversized="alone"))
    assert sorted(map(sorted, batches)) == [[0, 2], [1], [3]]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([], 4), {}, r"lengths=\[\] must hold one number of at least 0 for each sample"),
        ((["text"], 4), {}, r"lengths=\['text'\] must hold one number"),
        (([1, -1], 4), {}, r"lengths=\[1, -1\] must hold one number"),
        (([1], 0), {}, "budget=0 must be"),
        (([1], 4), {"cost": "most"}, "cost='most'"),
        (([1, 3, 2], 4), {"cost": lambda lengths: -lengths.sum() if 3 in lengths else 1}, "returned -3 for sample 1"),
        (([2, 2], 4), {"cost": lambda lengths: float("nan")}, "cost returned nan for sample 0 of length 2. It must"),
        (([1], 4), {"buckets": 0}, "buckets=0 must be an integer of at least 1"),
        (([1], 4), {"oversized": "drop"}, "oversized='drop'"),
    ],
)
def test_wrong_arguments_are_named(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        BudgetBatchSampler(*arguments, **options)


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_batches_are_split_at_similar_cost(parts):
    sampler = BudgetBatchSampler(LENGTHS, 200, cost="sum")
    for batch in sampler:
        split = sampler.split_batch(batch, parts)
        assert len(split) == parts
        assert sorted(itertools.chain(*split)) == sorted(batch)
        assert sum(map(bool, split)) == min(parts, len(batch))
        costs = [sum(LENGTHS[part]) for part in split if part]
        assert max(costs) - min(costs) <= max(LENGTHS[batch])
        assert all(part == [index for index in batch if index in part] for part in split)


# -- training ----------------------------------------------------------------------------------------------------------

BUDGET, EPOCHS, STOP, ACCUMULATE = 60, 2, 30, 2


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 6), nn.Linear(6, 50)).double()


def make_samples():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 50, (length + 1,), generator=generator) for length in LENGTHS.tolist()]


def collate(samples):
    return nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-100)


def compute_loss(net, tokens):
    return nn.functional.cross_entropy(net(tokens[:, :-1].clamp(min=0)).flatten(0, 1), tokens[:, 1:].flatten())


class Task(SGDTask):
    def __init__(self, weighted):
        super().__init__()
        self.net, self.weighted, self.seen = make_net(), weighted, []

    def training_step(self, batch, batch_idx):
        micro = self.trainer.accelerator.cursor.micro
        self.seen.append((batch.tolist(), micro.samples, self.trainer.is_last_batch))
        if self.weighted:
            return {"loss": compute_loss(self.net, batch), "weight": (batch[:, 1:] != -100).sum()}
        return compute_mean_loss(self.net, batch)

    def validation_step(self, batch):
        self.log("val", compute_mean_loss(self.net, batch))


def compute_mean_loss(net, rows):
    return torch.stack([compute_loss(net, row[None, :]) for row in rows]).mean()


def make_sampler():
    return BudgetBatchSampler(LENGTHS, BUDGET, buckets=8)


def make_loader(sampler, **options):
    return DataLoader(make_samples(), batch_sampler=sampler, collate_fn=collate, **options)


@pytest.mark.parametrize("count", [len(LENGTHS) - 3, len(LENGTHS) + 3])
def test_lengths_of_another_dataset_are_refused(count):
    """With fewer lengths, the other samples would never be trained."""
    sampler = BudgetBatchSampler(np.resize(LENGTHS, count), BUDGET)
    with pytest.raises(ValueError, match=f"lengths of {count} samples, but the dataset has {len(LENGTHS)}"):
        make_trainer().fit(Task(True), make_loader(sampler))


def train_by_hand(weighted):
    """One process; a step's loss is the mean over all targets of its batches, or over all samples."""
    net, samples, sampler = make_net(), make_samples(), make_sampler()
    optimizer, lengths = torch.optim.SGD(net.parameters(), lr=0.1), []
    for epoch in range(EPOCHS):
        batches = iter(take(sampler, epoch))
        lengths.append(len(sampler))
        while step := list(itertools.islice(batches, ACCUMULATE)):
            rows = [samples[index] for batch in step for index in batch]
            if weighted:
                compute_loss(net, collate(rows)).backward()
            else:
                compute_mean_loss(net, rows).backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = {f"net.{name}": weight.detach() for name, weight in net.named_parameters()}
    return weights, lengths, compute_mean_loss(net, samples).item()


def fit_task(weighted, strategy, folder, ckpt_path=None, workers=0, **flags):
    world = treadle.PartialState().num_processes
    task = Task(weighted)
    trainer = make_trainer(
        max_epochs=EPOCHS, strategy=strategy, accumulate_grad_batches=ACCUMULATE, devices=world, **flags
    )
    loader = make_loader(make_sampler(), num_workers=workers)
    in_order = BudgetBatchSampler(LENGTHS, BUDGET, shuffle=False)
    trainer.fit(task, loader, make_loader(in_order), ckpt_path=ckpt_path)
    path = Path(folder, f"{weighted}-{strategy}-{world}-{flags.get('max_steps')}.ckpt")
    trainer.save_checkpoint(path)
    weights = {n: getattr(w, "full_tensor", w.clone)().detach() for n, w in task.named_parameters()}
    return task.seen, weights, (trainer.global_step, float(trainer.callback_metrics.get("val", 0))), str(path)


def train_and_resume(runs, folder, other):
    """By run: steps, the weights, what was seen, and whether a resumed run equals it, bit for bit."""
    torch.set_num_threads(1)
    results = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # that the order has changed
        for weighted, strategy, workers in runs:
            arguments = weighted, strategy, folder
            seen, weights, steps, _ = fit_task(*arguments, workers=workers)
            stopped, *_, path = fit_task(*arguments, max_steps=STOP, workers=workers)
            rest, resumed, *_ = fit_task(*arguments, ckpt_path=path, workers=workers)
            equal = stopped + rest == seen and all(torch.equal(weight, resumed[n]) for n, weight in weights.items())
            results[weighted, strategy] = steps, weights, seen, equal
        elsewhere = fit_task(True, "ddp", folder, ckpt_path=other)[1] if other else None
    return results, elsewhere


@pytest.mark.long
def test_any_number_of_ranks_takes_the_steps_of_one_process_and_resumes(tmp_path):
    expected = {weighted: train_by_hand(weighted) for weighted in (True, False)}
    lengths = expected[True][1]
    assert lengths[0] != lengths[1]
    assert lengths[0] / ACCUMULATE + 2 < STOP < sum(lengths) / ACCUMULATE - 2
    one = [(True, "auto", 0), (False, "auto", 0)]
    two = [(True, "ddp", 0), (False, "ddp", 2), (True, "fsdp", 0)]
    alone = run(train_and_resume, 1, one, str(tmp_path), None)
    other = str(tmp_path / f"True-auto-1-{STOP}.ckpt")
    ranks = run(train_and_resume, 2, two, str(tmp_path), other, timeout=200)
    for results, elsewhere in [*alone, *ranks]:
        for (weighted, strategy), (steps, weights, seen, resumed) in results.items():
            wanted, _, metric = expected[weighted]
            assert steps == (sum(-(-count // ACCUMULATE) for count in lengths), pytest.approx(metric, abs=1e-6))
            for name, weight in wanted.items():
                torch.testing.assert_close(
                    weights[name], weight, atol=1e-10, rtol=0, msg=f"{weighted} {strategy} {name}"
                )
            assert resumed, (weighted, strategy)
            assert [at for at, (_, _, last) in enumerate(seen, 1) if last] == list(itertools.accumulate(lengths))
        for name, weight in (elsewhere or {}).items():
            torch.testing.assert_close(weight, expected[True][0][name], atol=1e-10, rtol=0)
    parts = [[samples for _, samples, _ in ranks[rank][0][True, "ddp"][2]] for rank in range(2)]
    assert all(first + second for first, second in zip(*parts, strict=True))
    assert 0 in parts[1]  # of a batch of one sample
