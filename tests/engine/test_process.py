"""A process that runs a block first, and copies of what is bound to a process."""

import contextlib
import copy
import pickle
import time

import pytest
import torch
from support.processes import run
from torch import nn

import treadle


class Stop(BaseException):
    """As a signal's handler raises."""


def first(folder):
    state = treadle.Accelerator(cpu=True)
    path = folder / "prepared"
    with state.main_process_first():
        if state.is_main_process:
            time.sleep(0.3)
            path.write_text("data")
        assert path.read_text() == "data"
    with state.local_main_process_first():
        if not state.is_local_main_process:
            assert (folder / "local").exists()
        else:
            time.sleep(0.3)
            (folder / "local").touch()
    found = []
    for error in (KeyError("lost"), Stop(), SystemExit(3), KeyboardInterrupt()):
        try:
            with state.main_process_first():
                if state.is_main_process:
                    raise error
                found.append("ran on")
        except BaseException as caught:
            found.append((type(caught).__name__, str(caught)))
    for _ in range(2):  # leaving it early frees the others too
        with state.main_process_first():
            continue
    with contextlib.suppress(ValueError), state.main_process_first():
        if not state.is_main_process:
            raise ValueError("on another process, after rank zero")
    state.wait_for_everyone()  # all are still in step
    return found


@pytest.mark.long
def test_the_main_process_first(tmp_path):
    own = [("KeyError", "'lost'"), ("Stop", ""), ("SystemExit", "3"), ("KeyboardInterrupt", "")]
    (tmp_path / "3").mkdir()
    assert run(first, 1, tmp_path) == [own]
    main, *others = run(first, 3, tmp_path / "3")
    assert main == own
    told = [
        ("PeerFailed", "rank 0 failed: KeyError: 'lost'"),
        ("PeerFailed", "rank 0 failed: Stop: "),
        ("SystemExit", "3"),
        ("PeerFailed", "rank 0 failed: KeyboardInterrupt: "),
    ]
    assert others == [told] * 2


class Own(treadle.Accelerator):
    def __init__(self):
        super().__init__(cpu=True)


def test_copies_and_pickles_of_an_accelerator():
    """An average of a model that holds its Accelerator is a plain deep copy; skorch pickles an estimator with one."""
    accelerator = treadle.Accelerator(cpu=True, gradient_accumulation_steps=3, on_nonfinite="skip")
    model = nn.Linear(1, 1)
    model.accelerator = accelerator
    average = copy.deepcopy(model)
    assert average.accelerator is accelerator
    assert average.weight is not model.weight
    accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    loaded = pickle.loads(pickle.dumps(model)).accelerator
    assert (loaded.gradient_accumulation_steps, loaded.on_nonfinite, loaded.models) == (3, "skip", [])
    with pytest.raises(TypeError, match=r"Own can't be pickled.* Create one in each process"):
        pickle.dumps(Own())


def pickle_one_of_two():
    with pytest.raises(TypeError, match=r"Accelerator can't be pickled.* Create one in each process"):
        pickle.dumps(treadle.Accelerator(cpu=True))


def test_an_accelerator_of_two_processes_can_not_be_pickled():
    run(pickle_one_of_two, 2)


def pickle_state(folder):
    state = treadle.PartialState(cpu=True)
    if state.is_main_process:
        (folder / "arguments.bin").write_bytes(pickle.dumps({"distributed_state": state}))
    state.wait_for_everyone()
    loaded = pickle.loads((folder / "arguments.bin").read_bytes())["distributed_state"]
    return type(loaded).__name__, loaded.process_index, loaded.num_processes, str(loaded.device)


def test_a_pickled_state_is_that_of_the_process_that_loads_it(tmp_path):
    """`torch.save(trainer.args)` of transformers writes one, in each checkpoint."""
    assert run(pickle_state, 2, tmp_path) == [("PartialState", rank, 2, "cpu") for rank in (0, 1)]


def who():
    accelerator = treadle.Accelerator()  # neither cpu=True nor ACCELERATE_USE_CPU
    return accelerator.num_processes, accelerator.process_index, accelerator.is_main_process


@pytest.mark.skipif(torch.cuda.is_available(), reason="each process takes a GPU")
def test_processes_of_a_launcher_are_one_run_on_the_cpu_too():
    assert run(who, 2) == [(2, 0, True), (2, 1, False)]
