"""`Trainer(compile=...)`: the parts that a step calls are compiled; names, numbers and logging stay what they are.

The compiler is a function that counts the graphs it is given and runs them as they are.
"""

import copy
import pickle
import re
import shutil

import pytest
import torch
from support.fit_runs import Line
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, TensorDataset
from treadle.engine import TorchDynamoPlugin
from treadle.strategies.wrap_policy import split_into_blocks

import treadle as tl


class Counting:
    """A backend for ``torch.compile``: the names of the operations in each graph."""

    def __init__(self):
        torch._dynamo.reset()
        counters.clear()
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    @property
    def breaks(self):
        return sum(counters["graph_break"].values())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class Net(tl.TaskModule):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.heads = nn.ModuleDict({"out": nn.Linear(4, 1)})
        self.loss = nn.MSELoss()
        self.seen = []

    def compute(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.heads["out"](x)

    def training_step(self, batch, batch_idx):
        loss = self.loss(self.compute(batch[0]), batch[1])
        self.log("loss", loss)
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(self.compute(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def loader(batch_size=4):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size)


def trainer_in(root, **flags):
    return make_trainer(default_root_dir=root, **{"max_epochs": 2, **flags})


def new(kind=Net):
    torch.manual_seed(0)
    return kind()


def plain_losses(root, kind=Net, **flags):
    task = new(kind)
    trainer_in(root, **flags).fit(task, loader())
    return task.seen


def test_the_parts_are_compiled_and_nothing_else_changes(tmp_path):
    counting, task = Counting(), new()
    names = list(task.state_dict())
    trainer = trainer_in(tmp_path, compile={"backend": counting, "fullgraph": True})
    trainer.fit(task, loader(), loader())
    # Stem, head and loss once each for training and validation. Six blocks that are alike share theirs.
    assert len(counting.graphs) == 8
    assert all(graph for graph in counting.graphs)
    assert counting.breaks == 0
    assert list(task.state_dict()) == names
    assert task.blocks[3]._compiled_call_impl is not None
    assert task.seen == plain_losses(tmp_path)
    assert trainer.callback_metrics["val"] > 0
    assert "torch.compile: stem, blocks.0, " in trainer.decided
    assert "heads.out, loss, each compiled by its first calls, which take longer" in trainer.decided


class Inner(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.stem, self.blocks, self.heads = net.stem, net.blocks, net.heads

    forward = Net.compute


class Deep(Net):
    """The same, with the network in one part."""

    def __init__(self, blocks=6):
        super().__init__()
        del self.blocks[blocks:]
        self.net = Inner(self)
        del self.stem, self.blocks, self.heads

    def compute(self, x):
        return self.net(x)


@pytest.mark.long
@pytest.mark.parametrize(
    ("blocks", "regional", "compiled"),
    [
        (6, None, {"net.stem", *(f"net.blocks.{n}" for n in range(6)), "net.heads.out", "loss"}),
        pytest.param(2, None, {"net", "loss"}, marks=pytest.mark.exhaustive),  # little would be shared
        (2, True, {"net.stem", "net.blocks.0", "net.blocks.1", "net.heads.out", "loss"}),
        pytest.param(6, False, {"net", "loss"}, marks=pytest.mark.exhaustive),
    ],
)
def test_repeated_blocks_within_a_part_are_compiled_once(tmp_path, blocks, regional, compiled):
    counting, task = Counting(), new(lambda: Deep(blocks))
    setting = {"backend": counting, "use_regional_compilation": regional}
    trainer_in(tmp_path, compile=setting).fit(task, loader())
    assert set(tl.engine.list_compiled_names(task)) == compiled
    assert len(counting.graphs) == 2 + 2 * ("net" not in compiled)
    assert task.seen == plain_losses(tmp_path, lambda: Deep(blocks))


def test_stages_that_differ_are_compiled_as_one():
    class Stage(Block):
        def __init__(self, width):
            super().__init__()
            self.more = nn.Linear(width, width)

    net = nn.ModuleDict({"net": nn.Sequential(*(Stage(width) for width in (1, 1, 2, 2, 3, 3)))})
    assert split_into_blocks(net) == [net["net"]]


def test_blocks_are_not_split_into_the_blocks_within_them():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(1)
            self.experts = nn.ModuleList([nn.Sequential(nn.Linear(1, 1)) for _ in range(3)])

    net = nn.Module()
    net.layers = nn.ModuleList([Layer() for _ in range(4)])
    for always in (True, None):
        assert split_into_blocks(net, always) == list(net.layers)


@pytest.mark.long
def test_a_short_last_batch_makes_no_graph_and_leaves_those_of_full_ones(tmp_path):
    counting, task = Counting(), new()
    trainer_in(tmp_path, compile={"backend": counting}).fit(task, loader(6), loader(6))
    assert len(counting.graphs) == 8
    plain = new()
    trainer_in(tmp_path).fit(plain, loader(6), loader(6))
    assert task.seen == plain.seen
    # A validation that follows the short batch is compiled all the same.
    counting = Counting()
    trainer_in(tmp_path, num_sanity_val_steps=0, compile={"backend": counting}).fit(new(), loader(6), loader(6))
    assert len(counting.graphs) == 8
    # Nothing but a short batch is compiled too.
    counting = Counting()
    trainer_in(tmp_path, compile={"backend": counting}).fit(new(), loader(64))
    assert len(counting.graphs) == 4


@pytest.mark.long
def test_recompilations_are_said(tmp_path, capsys):
    class Growing(Net):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return super().training_step((x[: batch_idx + 1], y[: batch_idx + 1]), batch_idx)

    Counting()
    trainer_in(tmp_path, compile={"backend": "eager", "dynamic": False}).fit(new(Growing), loader())
    said = capsys.readouterr()
    text = said.out + said.err
    found = re.search(r"torch.compile: (\d+) graphs, (\d+) recompiled \(first (\w+): (.*)\)", text)
    assert found, text
    assert (int(found[1]), int(found[2])) == (16, 12)  # four parts, four sizes
    assert "size mismatch at index 0. expected 1, actual 2" in found[4]


GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("options", "uses"),
    [
        ({"backend": "inductor"}, False),
        ({"backend": "inductor", "mode": "max-autotune-no-cudagraphs"}, False),
        ({"backend": "inductor", "mode": "reduce-overhead"}, True),
        ({"backend": "inductor", "mode": "max-autotune"}, True),
        ({"backend": "inductor", "options": {"triton.cudagraphs": True}}, True),
        ({"backend": "cudagraphs"}, True),
        ({"backend": "no", "mode": "reduce-overhead"}, False),
    ],
)
def test_which_modes_replay_cuda_graphs(options, uses):
    plugin = TorchDynamoPlugin(**options)
    assert plugin.uses_cuda_graphs(GPU) is uses
    assert not plugin.uses_cuda_graphs(torch.device("cpu"))


def test_cuda_graphs_are_told_of_each_batch_and_refused_under_accumulation(tmp_path, monkeypatch):
    monkeypatch.setattr(TorchDynamoPlugin, "uses_cuda_graphs", lambda plugin, device: plugin.mode == "reduce-overhead")
    begun = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(1))
    monkeypatch.setattr(TorchDynamoPlugin, "_make_compiler", lambda plugin, function: function)
    graphs = {"mode": "reduce-overhead"}
    trainer = trainer_in(tmp_path, compile=graphs)
    trainer.fit(new(), loader(), loader())
    assert len(begun) == 2 + 2 * (4 + 4)
    assert trainer.metrics.copies  # what is logged is not overwritten by the next replay
    with pytest.raises(ValueError, match=r"mode='reduce-overhead' replays CUDA graphs.*gradient_accumulation_steps=2"):
        trainer_in(tmp_path, compile=graphs, accumulate_grad_batches=2).fit(new(), loader())
    scheduler = tl.callbacks.GradientAccumulationScheduler({1: 4})
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4 needs their sum"):
        trainer_in(tmp_path, compile=graphs, callbacks=scheduler).fit(new(), loader())


@pytest.mark.long
def test_a_second_stage_compiles_nothing_anew_and_another_trainer_undoes_it(tmp_path):
    counting, task = Counting(), new()
    trainer = trainer_in(tmp_path, compile={"backend": counting})
    trainer.fit(task, loader(), loader())
    count = len(counting.graphs)
    trainer.fit(task, loader(), loader())
    assert len(counting.graphs) == count
    trainer_in(tmp_path).fit(task, loader(), loader())
    assert all(part._compiled_call_impl is None for part in task.modules())


def test_copies_and_pickles_are_plain(tmp_path):
    task = new()
    trainer_in(tmp_path, compile={"backend": Counting()}).fit(task, loader())
    task._trainer = None
    for other in (copy.deepcopy(task.blocks), pickle.loads(pickle.dumps(task.blocks))):
        assert other[0]._compiled_call_impl is None
        with torch.no_grad():
            other[0].inner.weight.zero_()
            other[0].inner.bias.zero_()
        assert torch.equal(other[0](torch.ones(1, 4)), torch.ones(1, 4))


@pytest.mark.long
@pytest.mark.parametrize(("first", "then"), [(False, True), (True, False)], ids=["into compiled", "out of compiled"])
def test_resume_from_one_into_the_other(first, then, tmp_path):
    flags = {True: {"compile": {"backend": Counting()}}, False: {}}
    whole = plain_losses(tmp_path)
    task = new()
    trainer = trainer_in(tmp_path, max_steps=3, **flags[first])
    trainer.fit(task, loader())
    trainer.save_checkpoint(tmp_path / "saved")
    again = new()
    trainer_in(tmp_path, **flags[then]).fit(again, loader(), ckpt_path=tmp_path / "saved")
    assert task.seen + again.seen == whole


class Steps(Net):
    """Logs in a step that is itself compiled."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(self.compute(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss * 1.0


@pytest.mark.long
@pytest.mark.parametrize("way", ["decorated", "assigned"])
def test_a_compiled_step_logs_between_two_graphs(way, tmp_path):
    counting = Counting()
    if way == "decorated":
        kind = type("Decorated", (Steps,), {"training_step": torch.compile(Steps.training_step, backend=counting)})
        task = new(kind)
    else:
        task = new(Steps)
        task.training_step = torch.compile(task.training_step, backend=counting)
    trainer = trainer_in(tmp_path)
    trainer.fit(task, loader())
    plain = new(Steps)
    other = trainer_in(tmp_path)
    other.fit(plain, loader())
    assert len(counting.graphs) == 2  # before and after the log
    assert len(counters["graph_break"]) == 1
    assert trainer.callback_metrics == other.callback_metrics
    assert set(trainer.callback_metrics) == {"loss", "loss_step", "loss_epoch"}


@pytest.mark.long
def test_a_task_that_torch_has_compiled_is_unwrapped_and_its_parts_compiled_so(tmp_path):
    counting, task = Counting(), new()
    trainer, compiled = trainer_in(tmp_path), torch.compile(task, backend=counting)
    trainer.fit(compiled, loader())
    assert len(counting.graphs) == 4
    assert trainer.task is task
    assert task.seen == plain_losses(tmp_path)
    assert all("_orig_mod" not in name for name in task.state_dict())
    assert trainer.validate(compiled, loader())[0]["val"] > 0
    count = len(counting.graphs)
    trainer.validate(compiled, loader())
    assert len(counting.graphs) == count
    with pytest.raises(ValueError, match="both configure compilation"):
        trainer_in(tmp_path, compile=True).fit(torch.compile(task), loader())


def test_what_the_user_compiled_stays_the_users(tmp_path):
    counting, task = Counting(), new()
    task.stem.compile(backend=counting)
    task.heads["out"] = torch.compile(task.heads["out"], backend=counting)
    own = task.stem._compiled_call_impl
    trainer_in(tmp_path, compile={"backend": Counting()}).fit(task, loader())
    trainer_in(tmp_path).fit(task, loader())
    assert task.stem._compiled_call_impl is own


def test_what_is_compiled_in_vain_is_said(tmp_path):
    class Encodes(Net):
        def compute(self, x):
            for layer in self.stem:  # not `self.stem(x)`
                x = layer(x)
            return self.heads["out"](x)

    task = new(Encodes)
    del task.blocks
    with pytest.warns(UserWarning, match="torch.compile had no effect on .*stem.* because no step called"):
        trainer_in(tmp_path, compile={"backend": Counting()}).fit(task, loader())

    with pytest.warns(UserWarning, match="Line has no submodule with parameters"):
        trainer_in(tmp_path, compile={"backend": Counting()}).fit(Line(), loader())


def test_wrong_arguments():
    with pytest.raises(ValueError, match="'inductor'"):
        make_trainer(compile={"backend": "inducter"})
    with pytest.raises(TypeError, match=r"modes.*'mode'"):
        make_trainer(compile={"modes": "max-autotune"})


def on_two_processes(root, strategy):
    counting, task = Counting(), new()
    flags = {"devices": 2, "strategy": strategy, "max_epochs": 1}
    trainer = trainer_in(root, compile={"backend": counting}, **flags)
    trainer.fit(task, loader(2), loader(2))
    trainer.save_checkpoint(f"{root}/saved")
    plain = new()
    trainer_in(root, **flags).fit(plain, loader(2), loader(2))
    again = new()  # from a compiled, perhaps sharded, run
    trainer_in(root, **{**flags, "max_epochs": 2}).fit(again, loader(2), ckpt_path=f"{root}/saved")
    assert 6 <= len(counting.graphs) <= 8
    assert counting.breaks == 0
    assert task.seen == plain.seen
    assert list(task.state_dict()) == list(Net().state_dict())


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_on_two_processes(strategy, tmp_path):
    run(on_two_processes, 2, str(tmp_path), strategy)


@pytest.mark.slow  # 25 s
@pytest.mark.skipif(shutil.which("gcc") is None, reason="inductor needs a C++ compiler")
def test_the_real_compiler(tmp_path):
    task = new(lambda: Deep(1))
    trainer_in(tmp_path, compile=True).fit(task, loader(), loader())
    torch.testing.assert_close(task.seen, plain_losses(tmp_path, lambda: Deep(1)), rtol=1e-4, atol=1e-6)
