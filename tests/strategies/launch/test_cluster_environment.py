"""The user's own class that tells the ranks on a cluster whose launcher is unknown."""

import os
import subprocess
import sys

import pytest
import torch
from support.processes import clean_environment
from support.trainers import make_trainer
from treadle.compat.demos.boring_classes import BoringModel
from treadle.compat.environment import get_free_port
from treadle.compat.plugins.environments import KubeflowEnvironment, MPIEnvironment, TorchElasticEnvironment
from treadle.strategies import DDP, ClusterEnvironment

import treadle

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
ADDRESS = {"MASTER_ADDR": "here", "MASTER_PORT": "29500"}
SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
SRUN |= {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
SRUN |= {"SLURM_NODEID": "0"}

PROGRAM = """
import os, sys
import torch
import treadle
from treadle.compat.demos.boring_classes import BoringModel
from treadle.compat.plugins.environments import ClusterEnvironment

class Own(ClusterEnvironment):
    @property
    def creates_processes_externally(self): return True
    @property
    def main_address(self): return "127.0.0.1"
    @property
    def main_port(self): return int(os.environ["OWN_PORT"])
    @staticmethod
    def detect(): return True
    def world_size(self): return 2
    def global_rank(self): return int(os.environ["OWN_RANK"])
    def local_rank(self): return int(os.environ["OWN_RANK"])
    def node_rank(self): return 0

torch.manual_seed(1)
model = BoringModel()
flags = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
trainer = treadle.Trainer(accelerator="cpu", plugins=[Own()], **flags)
trainer.fit(model, torch.utils.data.DataLoader(torch.arange(128.0).reshape(4, 32) / 128, batch_size=2))
print(trainer.global_rank, trainer.world_size, model.layer.weight.detach().double().sum().item())
"""


def test_ranks_of_an_unknown_launcher_train_like_one_process(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    port = {"OWN_PORT": str(get_free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, tmp_path / "program.py"],
            env=clean_environment(port | {"OWN_RANK": str(rank)}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    results = [process.communicate(timeout=120)[0].split() for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    torch.manual_seed(1)
    model = BoringModel()
    data = torch.utils.data.DataLoader(torch.arange(128.0).reshape(4, 32) / 128, batch_size=4)
    make_trainer(max_epochs=1).fit(model, data)
    expected = model.layer.weight.detach().double().sum().item()
    assert [result[:2] for result in results] == [["0", "2"], ["1", "2"]]
    for *_, total in results:
        assert float(total) == pytest.approx(expected, rel=1e-6)


@pytest.fixture
def environ(monkeypatch):
    monkeypatch.setattr(os, "environ", clean_environment())
    return os.environ


@pytest.mark.parametrize("own", [ClusterEnvironment, KubeflowEnvironment, MPIEnvironment, TorchElasticEnvironment])
@pytest.mark.parametrize("variables", [TORCHRUN | ADDRESS, SRUN])
def test_a_known_launcher_stays(environ, own, variables):
    environ.update(variables)
    before = dict(environ)
    assert own.detect()
    own().export(num_nodes=2)
    assert environ == before
    assert (own().world_size(), own().global_rank(), own().local_rank(), own().node_rank()) == (4, 1, 1, 0)


def test_what_a_subclass_defines_replaces_a_known_launcher(environ):
    class Port(ClusterEnvironment):
        main_port = 29501

    environ.update(SRUN)
    Port().export(num_nodes=2)
    expected = TORCHRUN | {"GROUP_RANK": "0", "MASTER_ADDR": "n1", "MASTER_PORT": "29501"}
    assert {name: environ[name] for name in expected} == expected


def test_without_a_known_launcher(environ):
    assert not TorchElasticEnvironment.detect()
    with pytest.raises(RuntimeError, match=r"plugins=ClusterEnvironment\(\) asks for world_size, but no launcher"):
        make_trainer(plugins=TorchElasticEnvironment())


def test_a_class_that_lets_treadle_start_the_processes(environ):
    class Own(ClusterEnvironment):
        creates_processes_externally = False

    assert make_trainer(plugins=Own()).world_size == 1
    assert "RANK" not in environ


def test_devices_and_machines_are_received(environ):
    received = []

    class Own(ClusterEnvironment):
        main_address, main_port = "here", 29500

        def world_size(self):
            return 1

        def global_rank(self):
            return 0

        local_rank = node_rank = global_rank

        def set_world_size(self, size):
            received.append(size)

        def set_global_rank(self, rank):
            received.append(rank)

    fabric = treadle.Fabric(accelerator="cpu", devices=1, strategy=DDP(cluster_environment=Own()))
    assert (fabric.world_size, received) == (1, [1, 0])
    assert environ["MASTER_PORT"] == "29500"
