"""``save_state(blocking=False)``: what is saved is the state of the moment, one at a time, and no failure is lost."""

import logging
import os
import shutil
import signal
import threading
import time

import pytest
import torch
from support.models import take_step
from support.processes import in_own_process, run, script
from support.saved_nets import prepared
from support.stored import read_part
from torch import nn
from treadle.engine.checkpoint import async_save, filesystem
from treadle.engine.checkpoint.content import select_optimizer_files
from treadle.engine.checkpoint.filesystem import TensorFile
from treadle.engine.checkpoint.store import CheckpointStore, verify
from treadle.strategies import DDP, FSDP

from treadle.testing.faults import Fault, FaultPlan


def step(accelerator, model, optimizer):
    take_step(accelerator, model, optimizer, torch.ones(2, 4))


class Gate:
    """Holds writers of tensors until it is opened, and lets those of ``failing`` fail."""

    def __init__(self, monkeypatch=None, failing=False):
        self.open = threading.Event()
        self.failing = failing
        write = filesystem.write_tensors

        def gated(path, tensors, notes):
            assert self.open.wait(60)
            if self.failing:
                raise OSError(5, "the disk is gone")
            return write(path, tensors, notes)

        (monkeypatch or pytest.MonkeyPatch()).setattr(filesystem, "write_tensors", gated)


@pytest.mark.guarantee
def test_what_is_saved_is_the_state_of_the_moment(tmp_path, monkeypatch):
    accelerator, model, optimizer = prepared()
    for number in range(3):  # the second and third reuse the copies' memory
        step(accelerator, model, optimizer)
        accelerator.save_state(tmp_path / f"now{number}")
        gate = Gate(monkeypatch)
        target = accelerator.save_state(tmp_path / f"beside{number}", blocking=False)
        assert not accelerator.poll_saving()
        assert not target.exists()
        step(accelerator, model, optimizer)  # while nothing of it is written yet
        torch.rand(3)
        gate.open.set()
        accelerator.finish_saving()
        assert accelerator.poll_saving()
        monkeypatch.undo()
        files = [path.name for path in (tmp_path / f"now{number}").iterdir() if path.name != "manifest.json"]
        for name in files:
            assert (tmp_path / f"now{number}" / name).read_bytes() == (target / name).read_bytes(), name


@pytest.mark.guarantee
@pytest.mark.parametrize("stepped", ["prepared", "own"])
def test_a_step_that_comes_before_its_optimizer_is_copied_waits_for_that(tmp_path, monkeypatch, stepped):
    accelerator, model, optimizer = prepared()
    accelerator.save_state(tmp_path / "now")
    make, begun, go_on = async_save.Copying.make, threading.Event(), threading.Event()

    def slowly(copying):
        if threading.current_thread().name == "treadle-save":
            with copying._lock:
                begun.set()
                assert go_on.wait(60)
        make(copying)

    monkeypatch.setattr(async_save.Copying, "make", slowly)
    accelerator.save_state(tmp_path / "beside", blocking=False)
    assert begun.wait(60)
    accelerator.backward(model(torch.ones(2, 4)).square().mean())  # needs nothing that is being copied
    threading.Timer(0.3, go_on.set).start()
    clock = time.monotonic()
    (optimizer if stepped == "prepared" else optimizer.optimizer).step()
    assert time.monotonic() - clock > 0.2
    accelerator.finish_saving()
    for name in ("optimizer.safetensors", "model.safetensors"):
        assert (tmp_path / "now" / name).read_bytes() == (tmp_path / "beside" / name).read_bytes(), name


@pytest.mark.guarantee
def test_a_state_that_is_changed_while_it_is_copied_is_not_saved(tmp_path, monkeypatch):
    accelerator, model, optimizer = prepared()
    make, go_on = async_save.Copying.make, threading.Event()
    monkeypatch.setattr(async_save.Copying, "make", lambda copying: go_on.wait(60) and make(copying))
    accelerator.save_state(tmp_path / "beside", blocking=False)
    optimizer.state[model.parts["head"].bias]["exp_avg"].zero_()
    go_on.set()
    with pytest.raises(RuntimeError, match=r"exp_avg in optimizer.safetensors was changed by something other than"):
        accelerator.finish_saving()
    assert os.listdir(tmp_path) == []
    accelerator.save_state(tmp_path / "after", blocking=False)
    accelerator.finish_saving()
    verify(tmp_path / "after")


def test_a_thread_that_can_not_start_leaves_nothing_to_wait_for(tmp_path, monkeypatch):
    accelerator, model, optimizer = prepared()

    def no_thread(*_):
        raise RuntimeError("can't start new thread")

    registered = []
    monkeypatch.setattr(async_save.atexit, "register", registered.append)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            accelerator.save_state(tmp_path / "bad", blocking=False)
    assert registered == []
    step(accelerator, model, optimizer)
    accelerator.save_state(tmp_path / "good", blocking=False)
    accelerator.finish_saving()
    assert os.listdir(tmp_path) == ["good"]


def test_only_the_optimizers_own_files_are_copied_later():
    later = {"optimizer.json", "optimizer-1.safetensors", "optimizer-rank-00003.json"}
    files = dict.fromkeys([*later, "optimizer_mine.json", "model.safetensors", "state.json"], b"")
    assert select_optimizer_files(files) == later


def test_what_is_noted_is_as_it_was(tmp_path):
    accelerator, *_ = prepared()
    seen = [1]
    accelerator.save_state(tmp_path / "a", info={"seen": seen}, blocking=False)
    seen.append(2)
    accelerator.finish_saving()
    assert accelerator.load_state(tmp_path / "a")["seen"] == [1]
    with pytest.raises(TypeError, match=r"is a tensor or an array, but save_state\(info=\.\.\.\) must .*\.item"):
        accelerator.save_state(tmp_path / "b", info={"loss": torch.tensor(1.0)}, blocking=False)
    with pytest.raises(ValueError, match="'world_size', which is reserved for the run's own metadata"):
        accelerator.save_state(tmp_path / "b", info={"world_size": 3})
    assert os.listdir(tmp_path) == ["a"]


def test_one_at_a_time(tmp_path, monkeypatch):
    accelerator, *_ = prepared()
    gate = Gate(monkeypatch)
    accelerator.save_state(tmp_path / "a", blocking=False)
    threading.Timer(0.3, gate.open.set).start()
    clock = time.monotonic()
    accelerator.save_state(tmp_path / "b", blocking=False)  # waits for the first
    assert time.monotonic() - clock > 0.2
    verify(tmp_path / "a")
    accelerator.save_state(tmp_path / "c")  # and so does one that blocks
    assert [path.name for path in CheckpointStore(tmp_path).find()] == ["a", "b", "c"]


@pytest.mark.guarantee
@pytest.mark.parametrize("asked", ["poll", "finish", "save", "load", "end", "free"])
def test_a_failure_surfaces_and_leaves_nothing(tmp_path, monkeypatch, asked):
    accelerator, *_ = prepared()
    accelerator.save_state(tmp_path / "good")
    gate = Gate(monkeypatch, failing=True)
    accelerator.save_state(tmp_path / "bad", blocking=False)
    gate.open.set()

    def poll():
        while not accelerator.poll_saving():
            time.sleep(0.01)

    ask = {
        "poll": poll,
        "finish": accelerator.finish_saving,
        "save": lambda: accelerator.save_state(tmp_path / "next"),
        "load": lambda: accelerator.load_state(tmp_path / "good"),
        "end": accelerator.end_training,
        "free": accelerator.free_memory,
    }[asked]
    with pytest.raises(OSError, match="the disk is gone"):
        ask()
    assert os.listdir(tmp_path) == ["good"]
    monkeypatch.undo()
    assert accelerator.poll_saving()  # said once


UNASKED = """
import sys, treadle
from torch import nn
from treadle.engine.checkpoint import filesystem as disk
accelerator = treadle.Accelerator(cpu=True)
accelerator.prepare(nn.Linear(2, 2))
if sys.argv[1] == "bad":
    def fail(*args):
        raise OSError(28, "no space left on this disk")
    disk.write_tensors = fail
accelerator.save_state(sys.argv[2], blocking=False)
print("the end")
"""


@pytest.mark.guarantee
def test_a_program_that_ends_waits_and_does_not_succeed_if_the_save_failed(tmp_path):
    done = script(UNASKED, "good", str(tmp_path / "good"))
    assert done.returncode == 0, done.stderr
    verify(tmp_path / "good")
    done = script(UNASKED, "bad", str(tmp_path / "bad"))
    assert done.returncode == 1
    assert "no space left on this disk" in done.stderr
    assert done.stdout == "the end\n"


@pytest.mark.guarantee
@in_own_process
def test_a_wait_that_is_interrupted_does_not_give_the_copies_away(tmp_path):
    accelerator, model, _ = prepared()
    weight, gate = model.parts["head"].weight, Gate()
    nn.init.constant_(weight, 1)
    accelerator.save_state(tmp_path / "one", blocking=False)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        accelerator.finish_saving()
    assert not accelerator.poll_saving()
    nn.init.constant_(weight, 2)
    threading.Timer(0.3, gate.open.set).start()
    accelerator.save_state(tmp_path / "two", blocking=False)
    accelerator.finish_saving()
    means = [read_part(tmp_path / name, "model")["parts.head.weight"].mean() for name in ("one", "two")]
    assert means == [1, 2]


def no_room_for_copies(root):
    accelerator, model, optimizer = prepared(strategy="ddp")
    copy = accelerator.checkpointer.host_copies.copy_tensors

    def fails(*args):
        if accelerator.process_index == 1:
            raise MemoryError("no host memory")
        return copy(*args)

    accelerator.checkpointer.host_copies.copy_tensors = fails
    with pytest.raises((MemoryError, RuntimeError), match="no host memory"):
        accelerator.save_state(root / "bad", blocking=False)
    accelerator.checkpointer.host_copies.copy_tensors = copy
    step(accelerator, model, optimizer)
    accelerator.save_state(root / "good", blocking=False)
    accelerator.finish_saving()


def test_a_process_without_room_for_copies_fails_with_all_others(tmp_path):
    run(no_room_for_copies, 2, tmp_path)
    assert os.listdir(tmp_path) == ["good"]


@pytest.mark.guarantee
@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("point", ["disk:write_tensors:half", "disk:fsync:before", "disk:rename:before"])
def test_a_directory_that_is_deleted_during_a_save_is_written_again(tmp_path, blocking, point):
    accelerator, *_ = prepared()
    with FaultPlan([Fault(point, lambda firing: shutil.rmtree(tmp_path / "run"))]):
        accelerator.save_state(tmp_path / "run" / "last", blocking=blocking)
        accelerator.finish_saving()
    assert os.listdir(tmp_path / "run") == ["last"]
    assert verify(tmp_path / "run" / "last").step == 1


def two_processes(strategy, root):
    accelerator, model, optimizer = prepared(strategy={"zero": DDP(zero=True), "fsdp": FSDP()}[strategy])
    rank = accelerator.process_index
    accelerator.save_state(root / "now")
    gate = Gate()
    accelerator.save_state(root / "beside", blocking=False)
    for _ in range(3):  # exchanges of the training, in another order than those of the save
        step(accelerator, model, optimizer)
    gate.open.set()
    accelerator.finish_saving()
    gate.failing = rank == 1
    accelerator.save_state(root / "bad", blocking=False)
    step(accelerator, model, optimizer)
    try:
        accelerator.finish_saving()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.long
@pytest.mark.parametrize("strategy", [pytest.param("zero", marks=pytest.mark.slow), "fsdp"])
def test_two_processes(tmp_path, strategy):
    first, second = run(two_processes, 2, strategy, tmp_path)
    assert first == "PeerFailed: rank 1 failed: OSError: [Errno 5] the disk is gone"
    assert second == "OSError: [Errno 5] the disk is gone"
    assert sorted(os.listdir(tmp_path)) == ["beside", "now"]
    for name in os.listdir(tmp_path / "now"):
        if name != "manifest.json":
            assert (tmp_path / "now" / name).read_bytes() == (tmp_path / "beside" / name).read_bytes(), name


class Cudart:
    """Stands for CUDA's runtime, which pins memory."""

    cudaError = int

    def __init__(self, error=0):
        self.error, self.pinned = error, {}

    def cudaHostRegister(self, address, size, flags):
        if not self.error:
            self.pinned[address] = size
        return self.error

    def cudaGetErrorString(self, error):
        return {304: "operating system error"}[error]

    def cudaHostUnregister(self, address):
        del self.pinned[address]


class OnGpu(torch.Tensor):
    """Stands for a tensor on a GPU."""

    is_cuda = True


def gpu_files(*sizes):
    tensors = {f"t{n}": torch.arange(float(size)).as_subclass(OnGpu) for n, size in enumerate(sizes)}
    return {"optimizer.safetensors": TensorFile(tensors, {}), "state.json": b"{}"}


def test_tensors_of_a_gpu_share_one_pinned_slab(monkeypatch):
    cudart, buffers = Cudart(), {}
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    copies = async_save.HostCopies()
    copies._pin(gpu_files(3, 0, 100), buffers)
    assert list(cudart.pinned.values()) == [256 + 0 + 512]  # no more than what is copied
    assert [buffer.shape.numel() for buffer in buffers.values()] == [3, 0, 100]
    for number, buffer in enumerate(buffers.values()):
        buffer.fill_(number)
    assert [set(buffer.tolist()) for buffer in buffers.values()] == [{0.0}, set(), {2.0}]
    before = dict(cudart.pinned)
    copies._pin(gpu_files(3, 0, 100), buffers)  # the next save takes the same
    assert cudart.pinned == before
    copies._pin(gpu_files(3, 200), buffers)
    assert list(cudart.pinned.values()) == [256 + 1024]
    copies.clear()
    assert not cudart.pinned
    copies._pin(gpu_files(1), {})
    del copies
    assert not cudart.pinned


def test_memory_that_can_not_be_pinned_is_used_all_the_same(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(error=304))
    buffers = {}
    with caplog.at_level(logging.INFO):
        async_save.HostCopies()._pin(gpu_files(8), buffers)
    assert len(buffers) == 1
    assert "could not be pinned (operating system error, CUDA error 304)" in caplog.text
