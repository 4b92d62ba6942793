"""What users of the peers ask for in articles: whole scripts run, and errors on several processes name their cause.

What has a test elsewhere has none here.
"""

import contextlib
import io
import json
import logging
import warnings

import pytest
import torch
from support.models import SGDTask
from support.processes import run
from support.trainers import NO_OUTPUT
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import treadle
from treadle.utils import FullyShardedDataParallelPlugin

NO_OUTPUT = {"accelerator": "cpu", "max_epochs": 1, "num_sanity_val_steps": 0, **NO_OUTPUT}


# -- whole scripts -----------------------------------------------------------------------------------------------------

# The second stage has an Accelerator, a strategy and an optimizer of its own.
STAGES = """
import json
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle import Accelerator
from treadle.utils import set_seed

set_seed(7)
body, head = nn.Linear(4, 8), nn.Linear(8, 1)
net = nn.Sequential(body, nn.Tanh(), head)
dataset = TensorDataset(torch.randn(32, 4))
start = body.weight.detach().clone()
found = []
for strategy in ("auto", "fsdp"):
    accelerator = Accelerator(strategy=strategy)
    body.requires_grad_(strategy == "fsdp")
    loader = DataLoader(dataset, batch_size=8 // accelerator.num_processes)
    model = accelerator.prepare(net)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    for (inputs,) in loader:
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    weights = accelerator.get_state_dict(model)
    found += [[accelerator.strategy.name, accelerator.is_main_process and weights["0.weight"].tolist()]]
    accelerator.end_training()
    accelerator.destroy_process_group()
Accelerator().print(json.dumps([start.tolist(), found]))
"""

# What belongs to an experiment is built in it.
EXPERIMENTS = """
import gc, json, weakref
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle import Accelerator
from treadle.utils import set_seed

def experiment(lr, mixed_precision):
    accelerator = Accelerator(mixed_precision=mixed_precision)
    set_seed(9)
    model = nn.Linear(4, 1)
    known.append(weakref.ref(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8 // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (inputs,) in loader:
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    weights = accelerator.unwrap_model(model).weight.flatten().tolist()
    accelerator.end_training()
    accelerator.destroy_process_group()
    return weights

known, found = [], []
for lr, mixed_precision in [(0.1, "no"), (0.2, "no"), (0.1, "bf16"), (0.3, "no"), (0.1, "no")]:
    found.append(experiment(lr, mixed_precision))
gc.collect()
Accelerator().print(json.dumps([found, sum(model() is not None for model in known)]))
"""

SCRIPTS = {"stages": STAGES, "experiments": EXPERIMENTS}


def run_scripts():
    """Run each script, one after the other in the same processes; returns what each printed."""
    printed = {}
    for name, source in SCRIPTS.items():
        with contextlib.redirect_stdout(io.StringIO()) as text:
            exec(compile(source, name, "exec"), {"__name__": "__main__"})
        printed[name] = [json.loads(line) for line in text.getvalue().splitlines()]
    return printed


def by_hand(net, optimizer, batches):
    """Steps on the mean square without any library."""
    for (inputs,) in batches:
        optimizer.zero_grad()
        square(net, inputs).backward()
        optimizer.step()


def square(net, inputs):
    return net(inputs).square().mean()


def stages():
    torch.manual_seed(7)
    body, head = nn.Linear(4, 8), nn.Linear(8, 1)
    net, loader = nn.Sequential(body, nn.Tanh(), head), DataLoader(TensorDataset(torch.randn(32, 4)), 8)
    start = body.weight.tolist()
    by_hand(net, torch.optim.SGD(head.parameters(), lr=0.1), loader)
    by_hand(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
    return start, body.weight.flatten().tolist()


def experiment(lr):
    torch.manual_seed(9)
    net = nn.Linear(4, 1)
    loader = DataLoader(TensorDataset(torch.randn(32, 4)), 8, shuffle=True)
    by_hand(net, torch.optim.SGD(net.parameters(), lr=lr), loader)
    return net.weight.flatten().tolist()


@pytest.mark.long
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_the_scripts_end_as_a_loop_by_hand(world):
    main, *others = run(run_scripts, world)
    assert all(printed == [] for other in others for printed in other.values())

    ((start, ((first, frozen), (second, trained))),) = main["stages"]
    assert (first, second) == ("single" if world == 1 else "ddp", "fsdp")
    assert frozen == start == stages()[0]
    assert torch.tensor(trained).flatten().tolist() == close(stages()[1])

    ((found, alive),) = main["experiments"]
    assert found[0] == found[4] == close(experiment(0.1))
    assert (found[1], found[3]) == (close(experiment(0.2)), close(experiment(0.3)))
    assert found[2] == pytest.approx(experiment(0.1), abs=0.01)
    assert alive == 0


def close(wanted):
    return pytest.approx(wanted, rel=1e-4, abs=1e-6)


# -- two processes, started once -------------------------------------------------------------------------------------


class Task(SGDTask):
    """Goes wrong in the first step in the way that it is told to."""

    def __init__(self, mistake=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
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


def train(batch_size, accumulate=1, task=None, data=None):
    task = task or Task()
    trainer = treadle.Trainer(**NO_OUTPUT, accumulate_grad_batches=accumulate)
    trainer.fit(task, DataLoader(data or samples(), batch_size))


def error_of(call, *args, **kwargs):
    """What a call raised, with its notes."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return ""


def words_of(call, *args, **kwargs):
    """What was announced, and warned of, in a call."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("treadle").addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*args, **kwargs)
    logging.getLogger("treadle").removeHandler(handler)
    return said.getvalue() + "\n".join(str(each.message) for each in caught)


def on_each_process():
    """Everything that takes two processes but ends well; returns what this one saw."""
    accelerator = treadle.Accelerator(cpu=True)
    rank = accelerator.process_index
    split = treadle.Accelerator(cpu=True, split_batches=True)
    return {
        "world": accelerator.num_processes,
        "words": words_of(train, 2, 4),
        "other data": words_of(train, 2, data=samples(scale=rank + 1.0)),
        "other split": error_of(train, 2, data=torch.utils.data.Subset(samples(), [rank, *range(2, 9)])),
        "same data": words_of(train, 2, data=random_split(samples(), [10, 6], torch.Generator().manual_seed(2))[0]),
        "more data": error_of(train, 2, data=samples(8 + 4 * rank)),
        **{name: error_of(train, 2, task=Task(name)) for name in ("dtype", "device", "memory", "backward")},
        "gather": error_of(accelerator.gather_for_metrics, torch.ones(2, 3 + rank)),
        "reduce": error_of(accelerator.reduce, {"a": torch.ones(1), "b": torch.ones(2, 3 + rank)}),
        "number": error_of(accelerator.reduce, [torch.ones(1)] * (1 + rank)),
        "fp16": treadle.Accelerator(cpu=True, mixed_precision="fp16").precision.name,
        "fsdp": treadle.Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin()).strategy.name,
        "split": [len(batch) for batch in split.prepare(DataLoader(torch.arange(8), batch_size=4))],
        "odd split": error_of(lambda: list(split.prepare(DataLoader(torch.arange(6), batch_size=3)))),
        "reduction": error_of(accelerator.reduce, torch.ones(1), "average"),
    }


@pytest.fixture(scope="module")
def two():
    return run(on_each_process, 2)


def test_what_was_decided_is_said_once(two):
    assert "strategy ddp; precision 32-true" in two[0]["words"]
    assert "effective batch 16 = 2 per process x 2 processes x 4 accumulated" in two[0]["words"]
    assert two[1]["words"] == ""


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
        ("dtype", ["in net.0 (Linear).forward: its parameters are float32 on cpu", "input: float64 on cpu"]),
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
    assert error_of(train, 2, task=Task("memory")).count("\n") == 3
    own = Task()
    own.training_step = lambda batch, batch_idx: 1 / 0
    assert error_of(train, 2, task=own) == (
        "ZeroDivisionError: division by zero\nin fit, epoch 0, after optimizer step 0, in batch 0\n"
        "the batch: [Tensor (2, 2) float32]"
    )


def test_shapes_that_do_not_fit_together(two):
    for process in two:
        assert "rank 0: (2, 3) torch.float32; rank 1: (2, 4) torch.float32" in process["gather"]
        assert (
            "rank 0: (1,) torch.float32, (2, 3) torch.float32; rank 1: (1,) torch.float32, (2, 4)" in process["reduce"]
        )
        assert "reduce needs tensors of the same shapes" in process["number"]


def test_nothing_is_downgraded_in_silence(two):
    for process in two:
        assert process["world"] == 2
        assert process["fp16"] == "16-mixed"
        assert process["fsdp"] == "fsdp"
        assert process["split"] == [2, 2]
        assert "ValueError" in process["odd split"]
        assert "reduction='average' is not one of sum, mean" in process["reduction"]


def with_another_torch():
    if treadle.strategies.distributed.launch_environment.LaunchEnvironment.read().rank == 1:
        torch.__version__ = "1.0.0"
    treadle.Accelerator(cpu=True)


def test_all_processes_run_the_same_versions():
    with pytest.raises(ValueError, match=r"rank 1 runs torch 1\.0\.0, treadle .* but rank 0 runs torch 2\."):
        run(with_another_torch, 2)
