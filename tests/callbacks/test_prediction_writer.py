"""`BasePredictionWriter`: every sample is written once, with its place in the dataset, and nothing is kept."""

import gc
import weakref

import pytest
import torch
from support.callback_runs import Tiny, trainer
from support.processes import run
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, WeightedRandomSampler
from treadle.callbacks import BasePredictionWriter


class Doubles(Tiny):
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return batch * 2


class Keeps(BasePredictionWriter):
    """Writes into lists: (loader, batch's number, indices, what is at them), and the epoch's."""

    def __init__(self, write_interval="batch_and_epoch"):
        super().__init__(write_interval)
        self.batches, self.epochs = [], []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.batches.append((dataloader_idx, batch_idx, batch_indices, prediction.flatten().tolist()))

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.epochs.append((predictions, batch_indices))


def written(root, loaders, writer=None, keep=False, **flags):
    writer = writer or Keeps()
    made = trainer(root, writer, **flags)
    result = made.predict(Doubles(), loaders, return_predictions=keep)
    return writer, result


KINDS = {
    "plain": lambda count: {"batch_size": 2},
    "shuffled": lambda count: {"batch_size": 2, "shuffle": True},
    "weighted": lambda count: {"batch_size": 2, "sampler": WeightedRandomSampler([1.0] * count, count)},
    "batches": lambda count: {"batch_sampler": [part.tolist() for part in torch.arange(count).flip(0).split(3)]},
    "torch's batches": lambda count: {"batch_sampler": BatchSampler(range(count - 1, -1, -1), 2, False)},
    "single": lambda count: {"batch_size": None, "shuffle": True},
}


def loader_of(kind, count, workers=0):
    """A loader of the numbers below `count`, each of which is at its own index."""
    return DataLoader(torch.arange(float(count)), num_workers=workers, **KINDS[kind](count))


@pytest.mark.parametrize("kind", KINDS)
def test_the_indices_are_the_datasets(tmp_path, kind):
    writer, result = written(tmp_path, loader_of(kind, 7))
    assert result is None
    assert all(values == [2.0 * index for index in indices] for _, _, indices, values in writer.batches)
    assert [number for _, number, _, _ in writer.batches] == list(range(len(writer.batches)))
    seen = [index for _, _, indices, _ in writer.batches for index in indices]
    assert len(seen) == 7
    if kind != "weighted":
        assert sorted(seen) == list(range(7))
    ((predictions, indices),) = writer.epochs
    assert indices == [[indices for _, _, indices, _ in writer.batches]]
    assert [p.flatten().tolist() for p in predictions] == [values for *_, values in writer.batches]


def test_workers_that_read_ahead(tmp_path):
    writer, result = written(tmp_path, loader_of("shuffled", 12, workers=1), keep=True)
    assert all(values == [2.0 * index for index in indices] for _, _, indices, values in writer.batches)
    assert [p.tolist() for p in result] == [values for *_, values in writer.batches]


def test_two_writers_and_two_loaders(tmp_path):
    first, second = Keeps("batch"), Keeps("epoch")
    made = trainer(tmp_path, first, second, limit_predict_batches=2)
    made.predict(Doubles(), [loader_of("plain", 5), loader_of("batches", 5)], return_predictions=False)
    assert [batch[:3] for batch in first.batches] == [(0, 0, [0, 1]), (0, 1, [2, 3]), (1, 0, [4, 3, 2]), (1, 1, [1, 0])]
    assert first.epochs == second.batches == []
    ((predictions, indices),) = second.epochs
    assert indices == [[[0, 1], [2, 3]], [[4, 3, 2], [1, 0]]]
    assert [[p.tolist() for p in each] for each in predictions] == [[[0, 2], [4, 6]], [[8, 6, 4], [2, 0]]]
    assert second._predictions == []


def on_two(root):
    writer, _ = written(root, loader_of("batches", 10), strategy="ddp", devices=2)
    return writer.batches, writer.epochs[0][1]


def test_two_processes_write_each_sample_once(tmp_path):
    seen = []
    for batches, indices in run(on_two, 2, tmp_path):
        assert all(values == [2.0 * index for index in own] for _, _, own, values in batches)
        assert indices == [[own for _, _, own, _ in batches]]
        seen += [index for own in indices[0] for index in own]
    assert sorted(seen) == list(range(10))


class Stream(IterableDataset):
    """Knows how many of its samples live."""

    def __init__(self, count):
        self.count, self.alive, self.most = count, weakref.WeakSet(), 0

    def __iter__(self):
        for index in range(self.count):
            sample = torch.full((256,), float(index))
            self.alive.add(Held(sample))
            self.most = max(self.most, len(self.alive))
            yield sample


class Held:
    """Something that lives as long as a tensor."""

    def __init__(self, tensor):
        tensor.held = self


def test_a_long_stream_takes_no_memory(tmp_path):
    class Counts(BasePredictionWriter):
        sizes = []

        def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
            assert batch_indices is None
            if batch_idx in (50, 200, 599):
                del prediction, batch
                gc.collect()
                self.sizes.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))

    stream = Stream(600)
    made = trainer(tmp_path, Counts("batch"))
    made.predict(Doubles(), DataLoader(stream, batch_size=None), return_predictions=False)
    assert stream.most <= 4
    assert len(Counts.sizes) == 3
    assert max(Counts.sizes) - min(Counts.sizes) <= 2


def test_what_is_wrong_is_said_at_once(tmp_path):
    with pytest.raises(ValueError, match="Did you mean 'batch'"):
        Keeps("batches")

    class Half(BasePredictionWriter):
        def write_on_batch_end(self, *args):
            raise OSError("disk full")

    with pytest.raises(ValueError, match=r"needs the method write_on_epoch_end. Define it in Half"):
        Half("epoch")
    for interval in ("batch", "batch_and_epoch"):
        with pytest.raises(OSError, match="disk full"):
            written(tmp_path, loader_of("plain", 4), Half(interval))


def test_a_writer_may_do_all_of_it_in_the_hooks(tmp_path):
    class Collects(BasePredictionWriter):
        found = None

        def on_predict_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
            self.found = [*(self.found or []), batch_idx]

        def on_predict_epoch_end(self, trainer, pl_module):
            self.found.append("end")

    for interval in ("batch", "epoch", "batch_and_epoch"):
        collects = Collects(interval)
        written(tmp_path, loader_of("plain", 4), collects)
        assert collects.found[0] == 0
        assert collects.found[-1] == "end"
