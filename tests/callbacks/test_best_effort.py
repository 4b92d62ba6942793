"""What fails in a callback that is not needed does not end a run."""

import pytest
from support.callback_runs import fit
from treadle.callbacks import ThroughputMonitor


def test_a_function_that_fails_does_not_end_the_run(tmp_path):
    with pytest.warns(UserWarning, match="could not measure a batch.*TypeError"):
        made = fit(tmp_path, ThroughputMonitor(lambda batch: batch["tokens"]), log_every_n_steps=2)
    assert made.global_step == 10
