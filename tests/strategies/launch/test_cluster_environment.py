"""The user's own class that tells the ranks on a cluster whose launcher is unknown."""

import os

import pytest
import torch
from support.processes import clean_environment, run
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


class Own(ClusterEnvironment):
    creates_processes_externally, main_address = True, "127.0.0.1"
    size = 2

    def world_size(self):
        return self.size

    def global_rank(self):
        return self.rank

    def node_rank(self):
        return 0

    local_rank = global_rank


def train(batch_size, **flags):
    torch.manual_seed(1)
    model, trainer = BoringModel(), make_trainer(**flags)
    trainer.fit(model, torch.utils.data.DataLoader(torch.arange(128.0).reshape(4, 32) / 128, batch_size))
    return trainer.global_rank, trainer.world_size, model.layer.weight.detach().double().sum().item()


def train_as_rank(port):
    Own.main_port, Own.rank = port, int(os.environ["RANK"])
    for name in os.environ.keys() - clean_environment().keys():
        del os.environ[name]
    return train(2, plugins=[Own()])


def test_ranks_of_an_unknown_launcher_train_like_one_process():
    *_, expected = train(4)
    weight = pytest.approx(expected, rel=1e-6)
    assert run(train_as_rank, 2, get_free_port()) == [(0, 2, weight), (1, 2, weight)]


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
    class Later(ClusterEnvironment):
        creates_processes_externally = False

    assert make_trainer(plugins=Later()).world_size == 1
    assert "RANK" not in environ


def test_devices_and_machines_are_received(environ):
    received = []

    class Received(Own):
        main_port, size, rank = 29500, 1, 0

        def set_world_size(self, number):
            received.append(number)

        set_global_rank = set_world_size

    fabric = treadle.Fabric(accelerator="cpu", devices=1, strategy=DDP(cluster_environment=Received()))
    assert (fabric.world_size, received) == (1, [1, 0])
    assert environ["MASTER_PORT"] == "29500"
