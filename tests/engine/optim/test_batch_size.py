"""Batch sizes that are found by trying: where memory ran out on one process, all start over."""

import functools
import gc
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from support.models import take_step
from support.processes import run
from torch import nn
from torch.utils.data import DataLoader
from treadle.engine import find_executable_batch_size
from treadle.engine.optim.batch_size import is_out_of_memory
from treadle.strategies.distributed import retry

import treadle


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (MemoryError(), True),
        (torch.cuda.OutOfMemoryError("x"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (torch.distributed.DistBackendError("NCCL error: Cuda failure 'out of memory'"), True),
        (NotImplementedError("out of memory"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
        (RuntimeError(), False),
    ],
    ids=str,
)
def test_what_counts_as_out_of_memory(error, memory):
    assert is_out_of_memory(error) is memory


def test_torch_itself_runs_out():
    @find_executable_batch_size(starting_batch_size=2**50)
    def allocate(batch_size):
        return torch.empty(batch_size if batch_size > 2**46 else 1, dtype=torch.uint8).numel()

    assert allocate() == 1


@pytest.mark.parametrize("accumulated", [{}, {"gradient_accumulation_steps": 3}], ids=["default", "passed"])
@pytest.mark.parametrize(
    ("start", "expected"),
    [(128, [128, 64, 32, 16]), (100, [100, 50, 25, 10]), (12, [12]), (127, [127, 1]), (30, [30, 15])],
    ids=str,
)
def test_sizes_divide_and_the_global_batch_stays(start, expected, accumulated, caplog):
    tried, whole = [], start * accumulated.get("gradient_accumulation_steps", 2)

    @find_executable_batch_size(starting_batch_size=start)
    def train(batch_size, word, gradient_accumulation_steps=2):
        tried.append(batch_size)
        assert batch_size * gradient_accumulation_steps == whole
        if batch_size > 16 or (start == 100 and batch_size > 10):
            raise MemoryError
        return word

    with caplog.at_level("INFO", logger="treadle"):
        assert train("found", **accumulated) == "found"
    assert tried == expected
    for size, line in zip(expected[1:], caplog.messages, strict=True):
        assert f"trying batch_size={size}. With gradient_accumulation_steps={whole // size}, the global" in line
    assert train("again", **accumulated) == "again"
    assert tried == expected * 2  # nothing is remembered


def test_a_reduction_of_ones_own():
    sizes = iter([90, 81, 81])

    @find_executable_batch_size(starting_batch_size=100, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size, limit):
        if batch_size > limit:
            raise MemoryError
        return batch_size

    assert train(90) == 90
    with pytest.raises(ValueError, match=r"batch_size=81 does not fit .* a positive integer below 81\."):
        train(10)


def test_other_errors_are_left_alone():
    error = RuntimeError("size mismatch")

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size):
        raise error

    with pytest.raises(RuntimeError) as caught:
        train()
    assert caught.value is error
    with pytest.raises(TypeError, match="which find_executable_batch_size passes"):
        train(64)


def hungry(batch_size):
    raise MemoryError


@pytest.mark.parametrize(
    ("size", "error", "words"),
    [
        (4, MemoryError, "even batch_size=1 failed"),
        (0, RuntimeError, "starting_batch_size=0"),
        (-1, ValueError, "starting_batch_size=-1"),
    ],
)
def test_sizes_of_which_none_fits(size, error, words):
    with pytest.raises(error, match=words):
        find_executable_batch_size(hungry, starting_batch_size=size)()


def test_functions_that_do_not_take_the_size():
    with pytest.raises(TypeError, match="the function was called with wrong arguments"):
        find_executable_batch_size(functools.partial(lambda size, rate: None), starting_batch_size=4)(1, 2)
    with pytest.raises(TypeError, match="must have the batch size as its first parameter"):
        find_executable_batch_size(lambda: None)


def test_nothing_of_a_failed_attempt_is_kept():
    alive = []

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size):
        assert [reference() for reference in alive] == [None] * len(alive)
        activations = torch.zeros(batch_size)
        alive.append(weakref.ref(activations))
        try:
            if batch_size > 1:
                raise KeyError("what the error came from holds frames too")
        except KeyError as error:
            inner(activations, error)
        return batch_size

    def inner(tensor, cause):
        raise MemoryError from cause

    gc.disable()
    try:
        assert train() == 1
    finally:
        gc.enable()
    assert len(alive) == 3


# -- several processes -----------------------------------------------------------------------------------------------


def network():
    torch.manual_seed(0)
    return nn.Linear(4, 1), torch.arange(64.0).view(16, 4) / 64


def fail_alone(module, inputs):
    """Memory runs out, while the other rank goes on into the gradient reduction."""
    if len(inputs[0]) > 2:
        raise MemoryError("on rank 1 alone")


def searching(outside, place):
    outer = treadle.Accelerator(cpu=True) if outside else None
    tried = []

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size, gradient_accumulation_steps=1):
        accelerator = outer or treadle.Accelerator(cpu=True)
        accelerator.free_memory()
        accelerator.gradient_accumulation_steps = gradient_accumulation_steps
        tried.append((batch_size, gradient_accumulation_steps))
        model, data = network()
        if place == "forward" and accelerator.process_index == 1:
            model.register_forward_pre_hook(fail_alone)
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size)
        )
        steps = 0
        for _ in range(2):
            for batch in loader:
                take_step(accelerator, model, optimizer, batch)
                steps += accelerator.sync_gradients
        if place == "end" and accelerator.process_index == 1 and batch_size > 2:
            raise MemoryError("once the others are through")
        return steps, accelerator.unwrap_model(model).weight.detach().flatten().tolist()

    found = [train(), train()]
    after = treadle.Accelerator(cpu=True)
    return tried, found, after.gather(torch.tensor(after.process_index)).tolist()


def by_hand():
    layer, data = network()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        layer(data).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return layer.weight.detach().flatten().tolist()


@pytest.mark.long
@pytest.mark.parametrize(
    ("outside", "place"),
    [
        pytest.param(False, "forward", id="made inside, forward"),
        pytest.param(True, "end", id="made outside, end"),
        pytest.param(True, "forward", id="made outside, forward", marks=pytest.mark.slow),
        pytest.param(False, "end", id="made inside, end", marks=pytest.mark.slow),
    ],
)
def test_memory_runs_out_on_one_of_two(outside, place):
    for tried, found, after in run(searching, 2, outside, place, timeout=60):
        assert tried == [(8, 1), (4, 2), (2, 4)] * 2
        assert after == [0, 1]
        for steps, weights in found:
            assert steps == 2
            assert weights == pytest.approx(by_hand(), abs=1e-6)


def waiting_in_a_collective_that_nothing_breaks_off():
    retry._is_nccl = dist.is_initialized  # gloo's collectives can be aborted, as nccl's
    durations = []

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size):
        accelerator = treadle.Accelerator(cpu=True)
        if batch_size > 4 and accelerator.process_index == 1:
            # As of nccl: the connection stays, and the other process waits on.
            retry.disconnect = lambda: time.sleep(3)
            raise MemoryError("on rank 1 alone")
        began = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1))
        finally:
            durations.append(time.monotonic() - began)
        return batch_size

    return train(), durations


@pytest.mark.long
def test_a_process_aborts_what_it_waits_in_once_another_has_failed():
    (size, durations), (other_size, _) = run(waiting_in_a_collective_that_nothing_breaks_off, 2, timeout=60)
    assert size == other_size == 4
    assert durations[0] < 2.5


def failing():
    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size):
        if treadle.Accelerator(cpu=True).process_index == 1:
            raise KeyError("a real mistake")

    with pytest.raises((KeyError, RuntimeError)) as caught:
        train()
    return f"{caught.typename}: {caught.value}"


def test_a_real_mistake_on_one_of_two_reaches_the_other():
    first, second = run(failing, 2)
    assert first == "PeerFailed: rank 1 failed: KeyError: 'a real mistake'"
    assert second == "KeyError: 'a real mistake'"
