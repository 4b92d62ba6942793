"""What users of the peers ask for in articles: whole scripts run, and errors on several processes name their cause.

What has a test elsewhere has none here.
"""

import io
import logging
import warnings

import pytest
import torch
from support.models import Line
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import treadle
from treadle.utils import FullyShardedDataParallelPlugin

# -- a whole script ----------------------------------------------------------------------------------------------------


def square(net, inputs):
    return net(inputs).square().mean()


def by_accelerator(net, data, strategy):
    """Train for an epoch; returns the strategy's name, and the first layer's weights on rank zero."""
    accelerator = treadle.Accelerator(cpu=True, strategy=strategy)
    loader = DataLoader(data, 8 // accelerator.num_processes)
    model = accelerator.prepare(net)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    for (inputs,) in loader:
        accelerator.backward(square(model, inputs))
        optimizer.step()
        optimizer.zero_grad()
    weights = accelerator.get_state_dict(model)
    found = accelerator.strategy.name, accelerator.is_main_process and weights["0.weight"].flatten().tolist()
    accelerator.end_training()
    accelerator.destroy_process_group()
    return found


def by_hand(net, data, strategy):
    """The same without any library."""
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for (inputs,) in DataLoader(data, 8):
        optimizer.zero_grad()
        square(net, inputs).backward()
        optimizer.step()
    return "by hand", net[0].weight.flatten().tolist()


def train_in_stages(train):
    """The second stage has an Accelerator, a strategy and an optimizer of its own."""
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    data, found = TensorDataset(torch.randn(32, 4)), []
    for strategy in ("auto", "fsdp"):
        net[0].requires_grad_(strategy == "fsdp")
        found.append(train(net, data, strategy))
    return found


@pytest.mark.long
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_the_scripts_end_as_a_loop_by_hand(world):
    (first, frozen), (second, trained) = run(train_in_stages, world, by_accelerator)[0]
    assert (first, second) == ("single" if world == 1 else "ddp", "fsdp")
    (_, start), (_, expected) = train_in_stages(by_hand)
    assert frozen == start
    assert trained == pytest.approx(expected, rel=1e-4, abs=1e-6)


# -- two processes, started once -------------------------------------------------------------------------------------


class Task(Line):
    """Goes wrong in the first step in the way that it is told to."""

    def __init__(self, mistake=None):
        super().__init__()
        self.mistake = mistake

    def training_step(self, batch, batch_idx):
        if self.mistake == "dtype":
            return self.net(batch[0].double()).mean()
        if self.mistake == "device":
            batch = {"pixels": batch[0], "label": torch.ones(2, 1, device="meta")}
            return nn.functional.mse_loss(self.net(batch["pixels"]), batch["label"])
        if self.mistake == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        loss = square(self.net, batch[0])
        if self.mistake == "backward":
            loss.backward()
        return loss


def samples(count=16, scale=1.0):
    return TensorDataset(scale * torch.randn(count, 2, generator=torch.Generator().manual_seed(1)))


def train(task=None, data=None, **flags):
    make_trainer(**flags).fit(task or Task(), DataLoader(data or samples(), 2))


def error_of(call, *args, **kwargs):
    """What a call raised, with its notes."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return ""


def words_of(**arguments):
    """What was announced, and warned of, in a training."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("treadle").addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(**arguments)
    logging.getLogger("treadle").removeHandler(handler)
    return said.getvalue() + "\n".join(str(each.message) for each in caught)


def on_each_process():
    """Everything that takes two processes but ends well; returns what this one saw."""
    accelerator = treadle.Accelerator(cpu=True)
    rank = accelerator.process_index
    return {
        "words": words_of(accumulate_grad_batches=4),
        "other data": words_of(data=samples(scale=rank + 1.0)),
        "other split": error_of(train, data=torch.utils.data.Subset(samples(), [rank, *range(2, 9)])),
        "same data": words_of(data=random_split(samples(), [10, 6], torch.Generator().manual_seed(2))[0]),
        "more data": error_of(train, data=samples(8 + 4 * rank)),
        **{name: error_of(train, task=Task(name)) for name in ("dtype", "device", "memory", "backward")},
        "gather": error_of(accelerator.gather_for_metrics, torch.ones(2, 3 + rank)),
        "reduce": error_of(accelerator.reduce, {"a": torch.ones(1), "b": torch.ones(2, 3 + rank)}),
        "number": error_of(accelerator.reduce, [torch.ones(1)] * (1 + rank)),
        "fsdp": treadle.Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin()).strategy.name,
        "reduction": error_of(accelerator.reduce, torch.ones(1), "average"),
    }


@pytest.fixture(scope="module")
def two():
    return run(on_each_process, 2)


def test_what_was_decided_is_said_once(two):
    assert "strategy ddp; precision 32-true" in two[0]["words"]
    assert "effective batch 16 = 2 per process x 2 processes x 4 accumulated" in two[0]["words"]
    assert two[1]["words"] == ""
    assert [process["fsdp"] for process in two] == ["fsdp"] * 2


def test_data_that_differs_between_processes(two):
    assert "different samples on every rank, so it is treated as already split by rank" in two[0]["other data"]
    assert two[1]["other data"] == ""  # all know, one says
    assert "different" not in two[0]["same data"]
    for process in two:
        words = "datasets on the ranks contain different data, but a dataset is sharded by index, so samples would be"
        assert f"{words} missed or" in process["other split"]
        assert "datasets on the ranks differ in length (rank 0: 8, rank 1: 12)" in process["more data"]


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("dtype", ["in net (Linear).forward: its parameters are float32 on cpu", "input: float64 on cpu"]),
        ("device", ["batch['pixels']: float32 on cpu", "batch['label']: float32 on meta"]),
        ("memory", ["out of memory", "accumulate_grad_batches", "find_executable_batch_size"]),
        ("backward", ["second time", "the backward pass has already run through this graph: leave the backward"]),
    ],
)
def test_an_error_of_torch_says_where_and_why(two, mistake, said):
    for rank, process in enumerate(two):
        for words in [*said, f"on rank {rank} of 2, in fit, epoch 0, after optimizer step 0"]:
            assert words in process[mistake]


def test_an_error_in_one_process_has_its_place_and_cause_only():
    assert error_of(train, task=Task("memory")).count("\n") == 3


def test_what_does_not_fit_together_is_named(two):
    for process in two:
        assert "rank 0: (2, 3) torch.float32; rank 1: (2, 4) torch.float32" in process["gather"]
        assert (
            "rank 0: (1,) torch.float32, (2, 3) torch.float32; rank 1: (1,) torch.float32, (2, 4)" in process["reduce"]
        )
        assert "reduce needs tensors of the same shapes" in process["number"]
        assert "reduction='average' is not one of sum, mean" in process["reduction"]


def with_another_torch():
    if treadle.strategies.distributed.launch_environment.LaunchEnvironment.read().rank == 1:
        torch.__version__ = "1.0.0"
    treadle.Accelerator(cpu=True)


def test_all_processes_run_the_same_versions():
    with pytest.raises(ValueError, match=r"rank 1 runs torch 1\.0\.0, treadle .* but rank 0 runs torch 2\."):
        run(with_another_torch, 2)
