"""Batches to the device, and results back to the host."""

import contextlib

import pytest
import torch
from support.trainers import make_trainer
from torch import Tensor
from torch.utils.data import DataLoader
from treadle.engine import move_data_to_device
from treadle.engine.data.device_transfer import _can_pin, _HostCopier

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


class Streams:
    """Stands for ``torch.cuda``, and writes down what is asked of it."""

    def __init__(self, monkeypatch, pinned=None):
        self.log = []
        fake = self

        class Event:
            def __init__(self, blocking):
                assert blocking  # a rank that waits keeps no core busy
                self.number = sum(entry.startswith("record") for entry in fake.log)

            def synchronize(self):
                fake.log.append(f"host waits for {self.number}")

        class Stream:
            def __init__(self, device):
                self.name = "side"

            def record_event(self, event):
                fake.log.append(f"record {event.number} on {self.name}")
                return event

            def wait_stream(self, other):
                fake.log.append(f"{self.name} waits for {other.name}")

        current = Stream(None)
        current.name = "current"

        @contextlib.contextmanager
        def stream(entered):
            fake.log.append(f"enter {entered.name}")
            yield

        for name, value in (("Event", Event), ("Stream", Stream), ("stream", stream)):
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
        monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: pinned is tensor)
        monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: self.log.append("pin") or tensor.clone())
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, on: self.log.append(f"kept for {on.name}"))


def test_large_batches_are_copied_beside_the_step_before(monkeypatch):
    streams = Streams(monkeypatch)
    copier = _HostCopier(torch.device("meta"))
    beside = ["enter side", "current waits for side", "kept for current"]
    for number in range(4):
        streams.log.clear()
        copier.begin_batch()
        assert copier(torch.ones(512, 1024)).device.type == "meta"
        waits = [] if number < 2 else ["host waits for 0"]
        assert streams.log == ["pin", "record 0 on current", *waits, *beside]
        copier(torch.ones(512, 1024))  # of the same batch
        assert streams.log[-4:] == ["pin", *beside]


def test_small_batches_and_pinned_ones(monkeypatch):
    small = torch.ones(8)
    streams = Streams(monkeypatch, pinned=small)
    copier = _HostCopier(torch.device("meta"))
    copier(small)
    assert not streams.log
    copier(torch.ones(8))
    assert streams.log == ["pin"]


def test_without_pinned_memory_batches_are_copied_all_the_same(monkeypatch):
    Streams(monkeypatch)

    def refuse(tensor):
        raise RuntimeError("CUDA error: resource exhausted\nmore of it")

    monkeypatch.setattr(Tensor, "pin_memory", refuse)
    copier = _HostCopier(torch.device("meta"))
    with pytest.warns(UserWarning, match=r"can't be pinned \(CUDA error: resource exhausted\), so the host waits"):
        assert copier(torch.ones(512, 1024)).shape == (512, 1024)
    assert copier(torch.ones(3)).shape == (3,)  # said once


def test_what_a_copy_in_pinned_memory_would_change_is_copied_as_it_is():
    images = torch.ones(2, 3, 4, 4)
    for tensor in (torch.ones(3), images, images.to(memory_format=torch.channels_last), torch.ones(6)[2:4]):
        assert _can_pin(tensor)
    others = [images.permute(3, 0, 1, 2), torch.ones(1).expand(3), torch.nn.Parameter(images), torch.ones(0)]
    others += [torch.ones(2, requires_grad=True), torch.ones(2, 2).to_sparse(), images.to("meta")]
    others += [torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), torch.ones(1).as_subclass(OnADevice)]
    for tensor in others:
        assert not _can_pin(tensor)


class Predicting(treadle.TaskModule):
    def __init__(self, device):
        super().__init__()
        self.make = device

    def predict_step(self, batch):
        return {"double": self.make(*(2 * batch).tolist())}


def test_predictions_are_those_that_the_device_computed(device):
    found = make_trainer().predict(Predicting(device), DataLoader(torch.arange(5), batch_size=2))
    assert [each["double"].tolist() for each in found] == [[0, 2], [4, 6], [8]]
    assert OnADevice.copies
