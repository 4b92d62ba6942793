"""`PredictionWriter` and `read_predictions`: each sample once, in order, from any number of processes."""

import json
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from support.callback_runs import Tiny
from support.models import Stream
from support.processes import run
from support.trainers import make_trainer
from torch.utils.data import DataLoader
from treadle.callbacks import PredictionWriter

import treadle


def numbers(count):
    """Sample i is (i, 1)."""
    return torch.stack([torch.arange(float(count)), torch.ones(count)], 1)


def stream(count):
    return Stream(numbers(count))


@dataclass
class Box:
    corner: torch.Tensor
    label: str


class Describes(Tiny):
    """Returns everything that a prediction may be made of."""

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        ids = batch[:, 0]
        return {
            "ids": ids,
            "half": ids.bfloat16(),
            "words": [f"sample {int(number)}" for number in ids],
            "pair": (ids.numpy().astype(np.int64), float(ids.sum())),
            "boxes": [Box(row, "box") for row in batch],
        }


def predict(root, data, world=1, shard_mib=64, **flags):
    writer = PredictionWriter(root / "out", shard_mib)
    strategy = {"strategy": flags.pop("strategy", "ddp"), "devices": world} if world > 1 else {}
    made = make_trainer(callbacks=[writer], default_root_dir=root, **strategy, **flags)
    assert made.predict(Describes(), data, return_predictions=False) is None
    return writer.folder


def predict_each(root, kind, counts, world):
    return [predict(root / str(count), DataLoader(kind(count), batch_size=2), world) for count in counts]


@pytest.mark.parametrize("kind", [numbers, pytest.param(stream, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_every_sample_once_in_order(tmp_path, kind, world):
    counts = range(1, 2 * world * 2 + 2)
    folders = [tmp_path / str(count) / "out" for count in counts]
    assert run(predict_each, world, tmp_path, kind, counts, world) == [folders] * world
    for count, folder in zip(counts, folders, strict=True):
        batches = list(treadle.read_predictions(folder))
        assert torch.cat([batch["ids"] for batch in batches]).tolist() == list(range(count))
        assert [word for batch in batches for word in batch["words"]] == [f"sample {i}" for i in range(count)]
        for batch in batches:
            assert batch["half"].dtype == torch.bfloat16
            assert isinstance(batch["pair"], tuple)
            assert batch["pair"][0].tolist() == batch["ids"].tolist()
            assert [box["corner"][0].item() for box in batch["boxes"]] == batch["ids"].tolist()


def test_indices_of_a_shuffled_loader_and_of_given_batches(tmp_path):
    given = [[9, 8, 7], [6, 5, 4], [3, 2, 1], [0]]
    loaders = [DataLoader(numbers(7), batch_size=2, shuffle=True), DataLoader(numbers(10), batch_sampler=given)]
    run(predict, 2, tmp_path, loaders, 2)
    for number, count in enumerate((7, 10)):
        pairs = list(treadle.read_predictions(tmp_path / "out", number, indices=True))
        assert all(batch["ids"].tolist() == indices for indices, batch in pairs)
        assert sorted(index for indices, _ in pairs for index in indices) == list(range(count))


def test_several_loaders_and_a_taken_folder(tmp_path):
    first = predict(tmp_path, [DataLoader(numbers(3)), DataLoader(numbers(2))])
    second = predict(tmp_path, DataLoader(numbers(1)))
    assert [first.name, second.name] == ["out", "out-v1"]
    assert [len(list(treadle.read_predictions(first, loader))) for loader in (0, 1)] == [3, 2]
    with pytest.warns(UserWarning, match=r"out has older predictions than out-v1. .* pass PredictionWriter.folder"):
        treadle.read_predictions(first)
    with warnings.catch_warnings(action="error"):
        treadle.read_predictions(second)
    with pytest.raises(ValueError, match=r"dataloader_idx=2 has no predictions in .* Available: 0, 1"):
        treadle.read_predictions(first, 2)


def test_files_are_written_on_the_way(tmp_path):
    seen = []

    class Large(Tiny):
        def predict_step(self, batch, batch_idx):
            seen.append(len(list((tmp_path / "out").glob("*.safetensors"))))
            return torch.full((2**18,), float(batch[0, 0]))  # 1 MiB

    writer = PredictionWriter(tmp_path / "out", shard_mib=2)
    make_trainer(callbacks=[writer]).predict(Large(), DataLoader(numbers(7)), return_predictions=False)
    assert seen == [0, 0, 1, 1, 2, 2, 3]
    assert [batch[0].item() for batch in treadle.read_predictions(tmp_path / "out")] == list(range(7))


def test_what_failed_or_is_damaged_is_not_read(tmp_path):
    def broken():
        yield from numbers(2).split(1)
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        make_trainer(callbacks=[PredictionWriter(tmp_path / "half", 1)]).predict(Describes(), broken())
    with pytest.raises(ValueError, match="has no complete predictions"):
        treadle.read_predictions(tmp_path / "half")
    folder = predict(tmp_path, DataLoader(numbers(4)))
    index = json.loads((folder / "predictions.json").read_text())
    index["loaders"]["0"]["ranks"] = [["../out/" + name for name in index["loaders"]["0"]["ranks"][0]]]
    (folder / "predictions.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="outside the folder"):
        list(treadle.read_predictions(folder))
    index["loaders"]["0"]["ranks"] = []
    (folder / "predictions.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="only 0 of 4 batches"):
        list(treadle.read_predictions(folder))


def test_what_can_not_be_written_is_said(tmp_path):
    class Odd(Tiny):
        def predict_step(self, batch, batch_idx):
            return {"model": torch.nn.Linear(1, 1)}

    with pytest.raises(TypeError, match=r"0\.prediction\.model: a torch\.nn\.modules\.linear\.Linear can't be stored"):
        make_trainer(callbacks=[PredictionWriter(tmp_path / "out")]).predict(Odd(), DataLoader(numbers(1)))


def test_a_task_that_writes_by_itself_leaves_no_folder(tmp_path):
    class Own(Tiny):
        def predict_step(self, batch, batch_idx):
            return None

    writer = PredictionWriter(tmp_path / "out")
    make_trainer(callbacks=[writer]).predict(Own(), DataLoader(numbers(3)), return_predictions=False)
    assert writer.folder is None
    assert list(tmp_path.iterdir()) == []
