"""What a run records of its environment, and the warning if step_micro_batches can't keep the bits."""

import warnings

import pytest
import torch
from support.processes import run
from treadle.engine.run_environment import describe_kernels, warn_if_kernels_differ

import treadle


def test_another_environment_of_a_checkpoint_is_reported(tmp_path):
    accelerator = treadle.Accelerator(cpu=True, step_micro_batches=2)
    accelerator.prepare(torch.nn.Linear(1, 1))
    path = accelerator.save_state(tmp_path / "state")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.load_state(path)
        warn_if_kernels_differ(accelerator.world, describe_kernels(accelerator.device))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.warns(UserWarning, match=rf"of the checkpoint differ in threads \({threads + 1} and {threads}\)"):
            accelerator.load_state(path)
    finally:
        torch.set_num_threads(threads)


def find_warnings():
    found = []
    for leaves in (None, 2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accelerator = treadle.Accelerator(cpu=True, step_micro_batches=leaves)
            torch.set_num_threads(1 + accelerator.process_index)
            accelerator.compare_settings()
        found.append([str(w.message) for w in caught if "step_micro_batches does not lead" in str(w.message)])
    return found


def test_ranks_with_other_numbers_of_threads_are_reported():
    (without, of_main), (_, of_second) = run(find_warnings, 2)
    assert without == of_second == []
    assert of_main[0].startswith("the ranks differ in threads (1 and 2), so step_micro_batches does not lead")
