"""The rank that functions of ``lightning_utilities`` see before there is a Trainer."""

import os
import subprocess
import sys

import pytest

READ = """
import treadle
treadle.LightningModule
from lightning_utilities.core.rank_zero import rank_zero_only
print(rank_zero_only.rank)
"""


@pytest.mark.long
@pytest.mark.parametrize(("variables", "rank"), [({}, 0), ({"RANK": "1", "LOCAL_RANK": "0"}, 1), ({"RANK": "x"}, 0)])
def test_the_rank_is_known_once_a_name_of_lightning_is_used(variables, rank):
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "SLURM_PROCID")}
    read = subprocess.run([sys.executable, "-c", READ], env={**env, **variables}, capture_output=True, text=True)
    assert (read.stdout, read.stderr) == (f"{rank}\n", "")
