"""Batches to the device, and results back to the host."""

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from treadle.engine import move_data_to_device

import treadle


class OnADevice(Tensor):
    """Stands for a tensor on an accelerator: a non-blocking copy of it holds its values only once the device is done.

    Attributes:
        copies: for each ``.to``, the device and whether the copy blocks.
        late: what non-blocking copies have yet to receive.
    """

    copies = []
    late = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not Tensor.to:
            return super().__torch_function__(func, types, args, kwargs)
        tensor, device = args
        non_blocking = kwargs.get("non_blocking", False)
        cls.copies.append((str(device), non_blocking))
        values = tensor.as_subclass(Tensor)
        if not non_blocking:
            return values.clone()
        copy = torch.full_like(values, -1)
        cls.late.append((copy, values))
        return copy


@pytest.fixture
def device():
    OnADevice.copies.clear()
    OnADevice.late.clear()
    return lambda *values: torch.tensor(values).as_subclass(OnADevice)


def test_only_copies_into_a_device_with_streams_may_return_early(device):
    for name, non_blocking in (("cpu", False), ("mps", False), ("mps:0", False), ("cuda", True), ("cuda:1", True)):
        for target in (name, torch.device(name)):
            OnADevice.copies.clear()
            move_data_to_device({"a": [device(1), "text"]}, target)
            assert OnADevice.copies == [(name, non_blocking)]


def test_values_are_there_when_the_call_returns(device):
    moved = move_data_to_device((device(1, 2), {"b": device(3)}), "cpu")
    assert moved[0].tolist() == [1, 2]
    assert moved[1]["b"].tolist() == [3]


class Predicting(treadle.TaskModule):
    def __init__(self, device):
        super().__init__()
        self.make = device

    def predict_step(self, batch):
        return {"double": self.make(*(2 * batch).tolist())}


class Kept(treadle.callbacks.BasePredictionWriter):
    def __init__(self):
        super().__init__("epoch")
        self.kept = []

    def write_on_epoch_end(self, trainer, task, predictions, batch_indices):
        self.kept += [output["double"].tolist() for output in predictions]


def test_predictions_are_those_that_the_device_computed(device, tmp_path):
    writer = Kept()
    trainer = treadle.Trainer(
        accelerator="cpu", callbacks=writer, logger=False, enable_progress_bar=False, default_root_dir=tmp_path
    )
    found = trainer.predict(Predicting(device), DataLoader(torch.arange(5), batch_size=2))
    assert [each["double"].tolist() for each in found] == [[0, 2], [4, 6], [8]]
    assert writer.kept == [[0, 2], [4, 6], [8]]
    assert OnADevice.copies
