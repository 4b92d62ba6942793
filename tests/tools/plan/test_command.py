"""`treadle plan --config`: the run of a configuration, against what that run really does."""

import pytest
from support.planned_runs import plan


@pytest.mark.long
def test_the_run_of_a_configuration(here, capsys):
    status, out, _ = plan(capsys, "--no-advice")
    assert status == 0
    assert "plan of planned_task.Task on 2 x h100, fsdp, 32-true" in out
    assert "16 samples = 4 per micro-batch x 2 accumulated x 2 processes" in out
    assert "14 in all, 7 per epoch" in out  # 100 samples: six batches of 16 and one of 4
    assert "learning rate" in out
    status, out, _ = plan(capsys, "--no-advice", "--world-size", "64", "--micro-batch", "2", "model.width=8")
    assert "256 samples = 2 per micro-batch x 2 accumulated x 64 processes" in out


def test_what_is_wrong_is_explained(here, capsys):
    status, _, err = plan(capsys, "trainer.max_epoch=3")
    assert status == 2
    assert "max_epochs" in err
    status, _, err = plan(capsys, "model.manual=true")
    assert status == 2
    assert "automatic_optimization=False" in err
