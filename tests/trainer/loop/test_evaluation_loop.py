"""Evaluation is exact: each sample once on any number of processes, and the values those of one."""

import pytest
import torch
from support.models import Stream
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torchmetrics import MeanSquaredError, Metric, MetricCollection, PearsonCorrCoef
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

import treadle

BATCH = 2
KINDS = ("rows", "sized stream", "stream")


class Rows(Dataset):
    """Sample i: its number, four features and a class that are functions of it."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index >= self.count:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        return index, torch.randn(4, generator=generator), torch.tensor(index % 3)


class RowStream(Stream):
    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return map(self.samples.__getitem__, range(first, len(self.samples), step))


class SizedStream(RowStream):
    def __len__(self):
        return len(self.samples)


class Boxes(Metric):
    """Keeps a tensor for each sample, as detection metrics do: a list without a reduction, of rows of any number."""

    def __init__(self):
        super().__init__()
        self.add_state("boxes", default=[], dist_reduce_fx=None)

    def update(self, ids, features):
        self.boxes += [row[: 1 + int(number) % 3].outer(row) for number, row in zip(ids, features, strict=True)]

    def compute(self):
        return sum(box.double().sum() for box in self.boxes) / len(self.boxes)


class Judge(treadle.TaskModule):
    """Logs values, torchmetrics objects with every kind of state, and what it collects in lists of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Linear(4, 3)
        self.accuracy = MulticlassAccuracy(3, average="macro")
        self.several = MetricCollection({"mse": MeanSquaredError(), "pearson": PearsonCorrCoef()})
        self.area = BinaryAUROC()
        self.boxes = Boxes()
        self.ids, self.by_class, self.samples = [], {0: [], 1: [], 2: []}, 0
        self.register_buffer("total", torch.zeros(()))

    def forward(self, features):
        return self.net(features)

    def test_step(self, batch, batch_idx):
        ids, features, classes = batch
        logits = self(features)
        self.log("loss", nn.functional.cross_entropy(logits, classes))
        self.log("worst", features.max(), reduce_fx="max")
        self.log("samples", float(len(ids)), reduce_fx="sum")
        self.accuracy(logits, classes)
        self.log("accuracy", self.accuracy)
        self.several.update(logits[:, 0], features[:, 0])
        self.log_dict(self.several)
        self.area.update(logits[:, 0].sigmoid(), (classes == 0).long())
        self.boxes.update(ids, features)
        self.ids += ids.tolist()
        for number, row in zip(classes.tolist(), features, strict=True):
            self.by_class[number].append(row)
        self.samples += len(ids)
        self.total += features.sum()

    def on_test_epoch_end(self):
        self.log("area", self.area.compute())
        self.area.reset()
        self.log("boxes", self.boxes.compute())
        self.boxes.reset()
        every = [sum(map(len, self.by_class.values())), self.samples, len(self.ids), self.total.item()]
        counts = self.all_gather(torch.tensor(every, dtype=torch.float64)).reshape(-1, 4).sum(0)
        self.log_dict({f"own {i}": value for i, value in enumerate(counts)})

    def predict_step(self, batch, batch_idx):
        return {"id": batch[0], "logits": self(batch[1])}


def loader_of(kind, count, workers=0):
    rows = Rows(count)
    data = {"rows": rows, "stream": RowStream(rows), "sized stream": SizedStream(rows)}[kind]
    return DataLoader(data, batch_size=BATCH, num_workers=workers)


def evaluate_all(kind, workers, strategy, world, counts):
    """Return, for each number of samples: the ids of a test, its values, and the predictions."""
    found = []
    for count in counts:
        made = make_trainer(strategy=strategy, devices=world)
        task = Judge()
        (values,) = made.test(task, loader_of(kind, count, workers), verbose=False)
        predictions = made.predict(task, loader_of(kind, count, workers))
        numbers = [number for batch in predictions for number in batch["id"].tolist()]
        found.append((task.ids, values, numbers, torch.cat([batch["logits"] for batch in predictions])))
    return found


EVERY = [(kind, workers, *of) for kind in KINDS for workers in (0, 2) for of in (("ddp", 2), ("ddp", 3), ("fsdp", 2))]
QUICK = [("rows", 0, "ddp", 3)]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The variance of predictions", "ignore:No (positive|negative) samples")
@pytest.mark.parametrize(
    ("kind", "workers", "strategy", "world"),
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.exhaustive) for each in EVERY],
)
def test_any_number_of_samples_counts_as_on_one_process(kind, workers, strategy, world):
    rounds = 1 if (kind, workers, strategy, world) in QUICK else 2
    counts = range(1, rounds * world * BATCH + 2)
    expected = evaluate_all(kind, workers, "auto", 1, counts)
    ranks = run(evaluate_all, world, kind, workers, strategy, world, counts)
    for count, (_, reference, order, logits), *found in zip(counts, expected, *ranks, strict=True):
        assert sorted(number for ids, *_ in found for number in ids) == list(range(count))
        if count <= world:  # the correlation of one sample, which a rank may have, is no number for torchmetrics
            reference.pop("pearson")
        for _, values, numbers, own_logits in found:
            assert {name: values[name] for name in reference} == pytest.approx(reference, abs=1e-6, nan_ok=True), count
            assert numbers == order
            torch.testing.assert_close(own_logits, logits)


def test_values_are_those_of_the_whole_data():
    """The reference of the test above, computed without a loop of Treadle's, in double precision."""
    count = 11
    ((ids, values, *_),) = evaluate_all("rows", 0, "auto", 1, [count])
    samples = [Rows(count)[index] for index in range(count)]
    features, classes = torch.stack([s[1] for s in samples]), torch.stack([s[2] for s in samples])
    net = Judge().net.double()
    logits = net(features.double())
    hits = (logits.argmax(1) == classes).double()
    assert ids == list(range(count))
    assert values["loss"] == pytest.approx(nn.functional.cross_entropy(logits, classes).item())
    assert values["worst"] == features.max().item()
    assert values["samples"] == count
    assert values["accuracy"] == pytest.approx(torch.stack([hits[classes == c].mean() for c in range(3)]).mean().item())
    assert values["mse"] == pytest.approx((logits[:, 0] - features[:, 0]).square().mean().item(), rel=1e-5)
    positive, negative = logits[classes == 0, 0], logits[classes != 0, 0]
    assert values["area"] == pytest.approx((positive[:, None] > negative).double().mean().item())
