"""The rank that functions of ``lightning_utilities`` see before there is a Trainer."""

import os
import subprocess
import sys

import pytest

READ = """
{}
from lightning_utilities.core.rank_zero import rank_zero_only
print(rank_zero_only.rank)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("variables", "rank", "imports"),
    [
        ({}, 0, "from treadle import Callback"),
        ({"RANK": "1", "LOCAL_RANK": "0"}, 1, "import treadle.compat as pl"),
        ({"RANK": "x"}, 0, "from treadle.compat.callbacks import EarlyStopping"),
    ],
)
def test_the_rank_is_known_once_a_name_of_treadle_is_used(variables, rank, imports):
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "SLURM_PROCID")}
    command = [sys.executable, "-c", READ.format(imports)]
    read = subprocess.run(command, env={**env, **variables}, capture_output=True, text=True)
    assert (read.stdout, read.stderr) == (f"{rank}\n", "")
