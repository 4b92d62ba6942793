"""State objects of Accelerate's API, and functions that run on some processes."""

import gc
import itertools
import os
import time

import pytest
import torch
from support.models import Stream, take_step
from support.processes import run
from torch import nn
from torch.utils.data import DataLoader
from treadle.engine import AcceleratorState, GradientState, PartialState
from treadle.state import is_initialized

import treadle
from treadle import utils
from treadle.utils import DistributedType


def decorated():
    state = PartialState(cpu=True)
    rank, size = state.process_index, state.num_processes
    done = []

    @state.on_main_process
    def main(word):
        """Kept."""
        done.append(word)
        return word

    assert main.__name__ == "main"
    assert main.__doc__ == "Kept."
    assert main("main") == ("main" if rank == 0 else None)
    state.on_process(process_index=1)(lambda: done.append("second"))()
    state.on_process(lambda: done.append("called"), process_index=0)()
    state.on_last_process(lambda: done.append("last"))()
    state.on_local_main_process(lambda: done.append("local main"))()
    state.on_local_process(lambda: done.append("local"), local_process_index=0)()
    with pytest.raises(TypeError, match="process_index"):
        state.on_process(main)
    for index in (-1, 2) if size > 1 else (-1,):
        with pytest.raises(ValueError, match=f"process_index={index} must be"):
            state.on_process(main, process_index=index)
    return done


def test_on_some_processes(found):
    everything = ["main", "second", "called", "last", "local main", "local"]
    assert [by_rank["decorated"] for by_rank in found[1]] == [everything]
    first, second = (by_rank["decorated"] for by_rank in found[2])
    assert (first, second) == (["main", "called", "local main", "local"], ["second", "last"])


# -- state objects ---------------------------------------------------------------------------------------------------


def states():
    early = PartialState()  # under a launcher it is not alone
    accelerator = treadle.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    state, gradient = AcceleratorState.from_accelerator(accelerator), GradientState.from_accelerator(accelerator)
    assert AcceleratorState().mixed_precision == "bf16"
    assert AcceleratorState(mixed_precision="fp16").mixed_precision == "fp16"
    assert gradient.num_steps == 2
    assert "num_steps: 2" in repr(gradient)
    place = (early.process_index, early.num_processes, early.local_process_index, early.is_last_process)
    types = {early.distributed_type, accelerator.distributed_type, state.distributed_type}
    return (place, types, early.backend, early.use_distributed), repr(state)


def several():
    return {"states": states(), "decorated": decorated(), "compared": compared()}


@pytest.fixture(scope="module")
def found():
    return {world: run(several, world) for world in (1, 2)}


def test_states(found):
    assert found[1][0]["states"][0] == ((0, 1, 0, True), {DistributedType.NO}, None, False)
    (first, _), (second, text) = (by_rank["states"] for by_rank in found[2])
    assert first == ((0, 2, 0, False), {"MULTI_CPU"}, "gloo", True)
    assert second == ((1, 2, 1, True), *first[1:])
    assert text.splitlines() == [
        "Distributed environment: DistributedType.MULTI_CPU  Backend: gloo",
        "Num processes: 2",
        "Process index: 1",
        "Local process index: 1",
        "Device: cpu",
        "",
        "Mixed precision type: bf16",
    ]


def test_the_end_of_a_loader():
    accelerator = treadle.Accelerator(cpu=True)
    gradient = GradientState.from_accelerator(accelerator)
    loader = accelerator.prepare(DataLoader(range(5), batch_size=2))
    seen = [(gradient.end_of_dataloader, gradient.remainder, gradient.active_dataloader is loader) for _ in loader]
    assert seen == [(False, -1, True), (False, -1, True), (True, 1, True)]
    assert not gradient.in_dataloader


def test_the_end_of_a_stream():
    accelerator = treadle.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(Stream(range(5)), batch_size=2))
    gradient, seen = accelerator.gradient_state, []
    for batch in loader:
        with accelerator.accumulate(model):
            seen.append((accelerator.sync_gradients, gradient.end_of_dataloader, gradient.remainder))
        assert accelerator.gather_for_metrics(batch).tolist() == batch.tolist()
    assert seen == [(False, False, -1), (True, False, -1), (True, False, -1)]


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"no argument 'timeuot'. Did you mean 'timeout'\?"):
        PartialState(timeuot=3)
    with pytest.raises(TypeError, match="timedelta"):
        PartialState(timeout=3)


def test_states_without_an_accelerator_follow_the_newest():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    assert not is_initialized()
    assert PartialState._shared_state == {}
    state = PartialState(cpu=True)
    assert PartialState._shared_state  # read by transformers, on the class
    state.set_device()
    assert (state.num_processes, state.debug) == (1, False)
    assert not AcceleratorState().is_fsdp2
    gradient = GradientState(utils.GradientAccumulationPlugin(num_steps=3))
    assert (gradient.sync_gradients, gradient.num_steps, gradient.in_dataloader) == (True, 3, False)
    assert (gradient.remainder, gradient.end_of_dataloader, gradient.dataloader_references) == (-1, False, [None])
    gradient._set_sync_gradients(False)
    assert not GradientState().sync_gradients
    GradientState._reset_state()
    assert gradient.sync_gradients

    plugin = utils.GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = treadle.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_plugin=plugin)
    assert is_initialized()
    assert AcceleratorState().mixed_precision == "bf16"
    assert AcceleratorState().strategy is accelerator.strategy
    assert gradient.num_steps == GradientState().num_steps == 2
    assert not gradient.sync_with_dataloader
    assert gradient.plugin_kwargs == {"num_steps": 2, "sync_with_dataloader": False}
    loader = accelerator.prepare_data_loader([[1], [2]])
    assert [gradient.active_dataloader is loader for _ in loader] == [True, True]
    gradient.sync_gradients = False
    assert not accelerator.sync_gradients
    del loader, accelerator
    assert AcceleratorState().mixed_precision == "no"


def test_settings_of_accumulation_that_a_program_sets():
    """As several public programs do, after they have prepared everything."""

    def synced(**settings):
        accelerator = treadle.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        loader = accelerator.prepare_data_loader([[1], [2], [3]])
        for name, value in settings.items():
            accelerator.gradient_state.plugin_kwargs[name] = value
            assert accelerator.gradient_state.plugin_kwargs[name] == value
        assert accelerator.gradient_state.sync_with_dataloader == settings.get("sync_with_dataloader", True)
        found = []
        for _ in itertools.chain(loader, loader):
            with accelerator.accumulate(model):
                found.append(accelerator.sync_gradients)
        return found

    assert synced() == [False, True, True, False, True, True]
    assert synced(sync_with_dataloader=False) == [False, True, False, True, False, True]
    assert synced(num_steps=3, sync_each_batch=True) == [False, False, True, False, False, True]
    accelerator = treadle.Accelerator(cpu=True)
    accelerator.gradient_state.plugin_kwargs.update(num_steps=4)
    assert accelerator.gradient_accumulation_steps == 4
    accelerator = treadle.Accelerator(cpu=True, step_micro_batches=2)
    with pytest.raises(ValueError, match="step_micro_batches=2 can't be combined with sync_with_dataloader=False"):
        accelerator.gradient_state.plugin_kwargs["sync_with_dataloader"] = False
    with pytest.raises(TypeError, match="sync_with_loader"):
        accelerator.gradient_state.plugin_kwargs["sync_with_loader"] = False


def compared():
    """What each call says to tensors that differ by rank, without and with the debug mode."""
    state = PartialState(cpu=True)
    rank = state.process_index
    accelerator = treadle.Accelerator(cpu=True)
    rows, flat = torch.ones(rank + 1, 2), torch.ones(*[2] * (rank + 1))
    calls = {
        "gather": lambda: utils.gather(rows),
        "Accelerator.gather": lambda: accelerator.gather({"rows": rows}),
        "reduce": lambda: utils.reduce({"tensor": rows}),
        "broadcast": lambda: utils.broadcast([rows]),
        "pad_across_processes": lambda: utils.pad_across_processes(flat),
        "gather_for_metrics": lambda: accelerator.gather_for_metrics(rows),
    }
    found = {}
    for debug in (False, True):
        state.debug = debug
        assert PartialState().debug is debug
        found[debug] = set()
        for name, call in calls.items():
            try:
                call()
            except utils.DistributedOperationException as error:
                found[debug].add((name, isinstance(error, ValueError), "rank 0: " in str(error)))
    PartialState._reset_state()
    assert not state.debug
    return found


def test_the_debug_mode_compares_shapes(found):
    always = {(name, True, True) for name in ("reduce", "broadcast", "pad_across_processes")}
    in_debug_mode = {(name, True, True) for name in ("gather", "Accelerator.gather")}
    assert [by_rank["compared"] for by_rank in found[2]] == [{False: always, True: always | in_debug_mode}] * 2
    assert [by_rank["compared"] for by_rank in found[1]] == [{False: set(), True: set()}]


def test_distributed_types_compare_with_words():
    assert (DistributedType.FSDP, DistributedType.MULTI_GPU.value) == ("FSDP", "MULTI_GPU")
    names = "NO MULTI_CPU MULTI_GPU MULTI_NPU MULTI_MLU MULTI_SDAA MULTI_MUSA MULTI_XPU MULTI_HPU MULTI_NEURON"
    assert {*DistributedType} == {*names.split(), "DEEPSPEED", "FSDP", "XLA", "MEGATRON_LM"}


def test_a_distributed_type_prints_its_class():
    assert (str(DistributedType.NO), f"{DistributedType.NO}") == ("DistributedType.NO", "DistributedType.NO")


# -- one run after the other -----------------------------------------------------------------------------------------


def runs_in_turn(count):
    def train(strategy, precision):
        torch.manual_seed(0)
        model, data = nn.Linear(4, 1), torch.arange(48.0).view(12, 4) / 48
        accelerator = treadle.Accelerator(cpu=True, strategy=strategy, mixed_precision=precision)
        batches, optimizer = DataLoader(data, 12 // accelerator.num_processes), torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, batches)
        for _ in range(3):
            for batch in loader:
                take_step(accelerator, model, optimizer, batch)
        losses = accelerator.gather(model(data).pow(2).mean().detach())
        accelerator.destroy_process_group()
        return [round(loss, 4) for loss in losses.tolist()]

    def sockets():
        names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return sum(os.path.exists(name) and os.readlink(name).startswith("socket") for name in names)

    def tensors():
        gc.collect()
        return sum(issubclass(type(value), torch.Tensor) for value in gc.get_objects())

    found, open_after, alive = [], [], []
    for number in range(count):
        found.append(train("ddp", "bf16" if number % 2 else "no"))
        open_after.append(sockets())
        alive.append(tensors())
    patience = time.monotonic() + 10  # threads of the run before close their connections when they come to it
    while sockets() > open_after[1] and time.monotonic() < patience:
        time.sleep(0.05)
    open_after[-1] = sockets()
    return found, open_after, alive


@pytest.mark.long
def test_one_run_after_the_other():
    ((alone, _, _),) = run(runs_in_turn, 1, 2)
    first, second = run(runs_in_turn, 2, 5)
    for found, open_after, alive in (first, second):
        for number, losses in enumerate(found):
            expected = alone[number % 2][0]
            assert losses == pytest.approx([expected, expected], abs=1e-3 if number % 2 else 1e-4)
        assert open_after[-1] <= open_after[1]
        assert alive[-1] == alive[1]


def test_every_name_of_utils_is_there():
    assert [name for name in utils.__all__ if not hasattr(utils, name)] == []
    assert len(set(utils.__all__)) == len(utils.__all__)
