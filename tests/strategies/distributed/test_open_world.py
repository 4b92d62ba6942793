"""The world of a process: by the launcher's environment, and against flags."""

import itertools

import pytest
import torch
from support.launches import WHOLE
from treadle.strategies import LaunchEnvironment, open_world

pytestmark = pytest.mark.usefixtures("no_launcher")


NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def test_a_whole_environment():
    env = LaunchEnvironment.read(WHOLE)
    assert env == LaunchEnvironment(rank=1, world_size=4, local_rank=1, local_world_size=2, node_rank=0)
    alone = LaunchEnvironment.read({name: WHOLE[name] for name in NEEDED})
    assert (alone.local_rank, alone.local_world_size, alone.node_rank) == (0, 1, 1)
    assert LaunchEnvironment.read({}) is None
    assert LaunchEnvironment.read({"MASTER_ADDR": "here", "MASTER_PORT": "1"}) is None


@pytest.mark.guarantee
def test_half_an_environment_names_what_is_missing():
    for count in range(1, len(WHOLE)):
        for names in itertools.combinations(WHOLE, count):
            missing = [name for name in NEEDED if name not in names]
            told = any(name in names for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
            if not missing or not told:
                continue
            with pytest.raises(ValueError, match=rf"^{missing[0]} is not set, but \w+="):
                LaunchEnvironment.read({name: WHOLE[name] for name in names})


def test_flags_against_the_launcher(no_launcher):
    for name, value in WHOLE.items():
        no_launcher.setenv(name, value)
    with pytest.raises(ValueError, match=r"devices=3 asks for 3 .* started 2"):
        open_world("cpu", 3)
    with pytest.raises(ValueError, match="num_nodes=3, but the launcher started processes on 2 machines"):
        open_world("cpu", num_nodes=3)


def test_a_world_of_one_answers_at_once():
    world = open_world("cpu", 1)
    tensor = torch.tensor([2.0])
    assert (world.rank, world.size, world.is_main, world.device.type) == (0, 1, True, "cpu")
    assert world.all_reduce(tensor, "mean") is tensor
    assert world.all_gather(tensor) == [tensor]
    assert world.gather_objects("x") == ["x"]
    assert world.broadcast("x") == "x"
    assert world.broadcast_tensor(tensor) is tensor
    assert world.start_all_reduce(tensor) is None
    assert (world.any(True), world.any(False), world.all(True), world.all(False)) == (True, False, True, False)
    world.barrier()
    with pytest.raises(ValueError, match="Did you mean 'mean'"):
        world.all_reduce(tensor, "maen")
    with pytest.raises(KeyError):
        world.raise_together(KeyError("own"))
