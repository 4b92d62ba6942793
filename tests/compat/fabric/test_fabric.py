"""Programs for Lightning's Fabric print the same numbers with ours, on one process and on two."""

import re
import uuid
from types import SimpleNamespace

import pytest
import torch
from support.fabric_programs import PROGRAMS, Net
from support.processes import run
from torch import nn
from treadle.loggers import CSVLogger

import treadle
from treadle import Fabric

# Printed by `python fabric_programs.py PROGRAM PROCESSES` with lightning 2.6.6.
NUMBERS = {
    ("classify", 1): [2.2786803245544434, 17.0, 2.2524330615997314, 31.0],
    ("classify", 2): [2.326242446899414, 11.0, 2.2744789123535156, 12.0],
    ("imitate", 1): [0.5345580577850342, 0.9092825055122375],
    ("imitate", 2): [0.5844035148620605, 0.8304697871208191],
    ("adapt", 1): [2.317049741744995, 3.3261876106262207],
    ("adapt", 2): [2.280536651611328, 3.3100366592407227],
    ("write", 1): [0.9387590885162354],
    ("write", 2): [1.5354804992675781, 1.5318156480789185],
    ("play", 1): [0.6875, 1.126278281211853],
    ("play", 2): [0.625, 1.1350587606430054],
}


def played(name: str, devices: int) -> list[float]:
    return PROGRAMS[name](Fabric, devices)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if name == "classify" else ()) for name in PROGRAMS]
)
def test_a_program_prints_the_numbers_of_lightning(name: str) -> None:
    assert played(name, 1) == pytest.approx(NUMBERS[name, 1], rel=1e-5)


def all_played() -> dict[str, list[float]]:
    return {name: played(name, 2) for name in PROGRAMS}


def test_two_processes_print_the_numbers_of_lightning() -> None:
    first, second = run(all_played, 2)
    assert first == second
    for name, numbers in first.items():
        assert numbers == pytest.approx(NUMBERS[name, 2], rel=1e-5), name


def made() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


def test_names_of_the_process() -> None:
    fabric = made()
    assert (fabric.global_rank, fabric.local_rank, fabric.node_rank, fabric.world_size) == (0, 0, 0, 1)
    assert (fabric.is_global_zero, fabric.device, fabric.loggers) == (True, torch.device("cpu"), [])
    assert isinstance(fabric.accelerator, treadle.Accelerator)
    assert fabric.broadcast("x") == "x"
    assert fabric.all_gather(2.0).item() == fabric.all_reduce(2.0).item() == 2.0
    with pytest.raises(IndexError, match="has no logger"):
        fabric.logger  # noqa: B018


def test_a_checkpoint_comes_back(tmp_path) -> None:
    fabric = made()
    model = Net()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
    fabric.backward(model(torch.ones(2, 64)).mean())
    optimizer.step()
    path = tmp_path / "deep" / "state.ckpt"
    fabric.save(path, {"model": model, "optimizer": optimizer, "epoch": 3}, filter={"model": lambda k, v: "0" in k})
    assert sorted(torch.load(path, weights_only=True)["model"]) == ["net.0.bias", "net.0.weight"]
    fabric.save(path, {"model": model, "optimizer": optimizer, "epoch": 3, "more": [1]})
    other = Net()
    other, other_optimizer = fabric.setup(other, torch.optim.Adam(other.parameters()))
    state = {"model": other, "optimizer": other_optimizer, "epoch": 0}
    assert fabric.load(path, state) == {"more": [1]}
    assert state["epoch"] == 3
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert other_optimizer.state_dict()["state"][0]["step"] == 1
    assert sorted(fabric.load(path)) == ["epoch", "model", "more", "optimizer"]
    with pytest.raises(KeyError, match=r"does not contain the keys \['elsewhere'\] of"):
        fabric.load(path, {"elsewhere": 1})
    raw = tmp_path / "raw.pt"
    torch.save(model.state_dict(), raw)
    fabric.load_raw(raw, third := fabric.setup(Net()))
    assert torch.equal(third.net[0].weight, model.net[0].weight)


def test_calls_and_logs(tmp_path) -> None:
    seen: list[int] = []
    callback = SimpleNamespace(on_end=lambda epoch: seen.append(epoch))
    fabric = Fabric(accelerator="cpu", callbacks=callback, loggers=CSVLogger(tmp_path))
    fabric.call("on_end", epoch=1, loss=2.0)
    fabric.call("on_something")
    assert seen == [1]
    fabric.log("loss", torch.tensor(0.5), step=3)
    fabric.log_dict({"a": 1, "b": torch.tensor(2)})
    fabric.logger.save()
    assert (tmp_path / "treadle_logs" / "version_0" / "metrics.csv").read_text() == "step,loss,a,b\n3,0.5,,\n4,,1,2\n"


def test_errors() -> None:
    fabric = made()
    model = fabric.setup(Net())
    with pytest.raises(ValueError, match="Net is already set up"):
        fabric.setup(model)
    with pytest.raises(TypeError, match="a model that is set up"):
        fabric.no_backward_sync(Net())
    with pytest.raises(TypeError, match="not a list"):
        fabric.setup_dataloaders([1])
    with pytest.raises(ValueError, match="Pass exactly one of them"):
        fabric.clip_gradients(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for result in (3, None):  # of a function that was called instead of passed
        with pytest.raises(TypeError, match="without calling it"):
            fabric.launch(result)
    with pytest.raises(ValueError, match="filter has keys that are not in state"):
        fabric.save("x", {}, filter={"model": lambda k, v: True})
    model(torch.ones(1, 64)).sum().mul(float("inf")).backward()
    with pytest.raises(RuntimeError, match="norm is nan"):
        fabric.clip_gradients(model, fabric.setup_optimizers(torch.optim.SGD(model.parameters())), max_norm=1.0)


def sharded(folder: str) -> float:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="fsdp")
    fabric.seed_everything(0)
    model = fabric.setup(nn.Linear(4, 4))
    fabric.save(f"{folder}/model.ckpt", {"model": model})
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        before = model(torch.ones(1, 4)).sum().item()
        for parameter in model.parameters():
            parameter.zero_()
    fabric.load(f"{folder}/model.ckpt", {"model": model})
    fabric.backward(loss := model(torch.ones(1, 4)).sum())
    assert loss.item() == before
    optimizer.step()
    with pytest.raises(ValueError, match="optimizer of a sharded model"):
        fabric.save(f"{folder}/all.ckpt", {"optimizer": optimizer})
    return before


def test_a_sharded_model_is_saved_whole_and_loaded(tmp_path) -> None:
    first, second = run(sharded, 2, str(tmp_path))
    assert first == second


def trained_raw() -> list[str]:
    fabric = Fabric(accelerator="cpu", devices=2)
    prepared, raw, messages = fabric.setup(nn.Linear(2, 1)), nn.Linear(2, 1), []
    _optimizer = torch.optim.SGD(raw.parameters(), 0.1)  # without one, nothing would diverge
    cases = {"raw": lambda x: raw(x), "prepared": prepared, "its own module": prepared.module, "raw again": raw}
    for name, model in cases.items():
        try:
            fabric.backward(model(torch.ones(4, 2) * (fabric.global_rank + 1)).sum())
        except ValueError as error:
            messages.append(f"{name}: {error}")
        prepared.zero_grad()
    prepared(torch.ones(1, 2) * fabric.global_rank).sum().backward()
    assert prepared.weight.grad.tolist() == [[0.5, 0.5]]
    return messages


def test_a_model_that_was_not_set_up_is_told_where_ranks_would_diverge() -> None:
    words = r"raw.*: backward computed gradients of 2 parameters .*over the 2 processes.*use the module that setup ret"
    for messages in run(trained_raw, 2):
        assert [message.partition(":")[0] for message in messages] == ["raw", "raw again"]
        assert all(re.match(words, message) for message in messages)


def test_launch_starts_processes_where_no_script_can_be_run_again() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_fork")
    with pytest.raises(RuntimeError, match=r"fabric.launch\(function\)"):
        fabric.device  # noqa: B018
    with pytest.raises(TypeError, match="Pass the function to run"):
        fabric.launch()
    assert fabric.launch(lambda fabric, more: fabric.all_reduce(fabric.global_rank, reduce_op="sum") + more, 2) == 3
    assert made().launch(lambda fabric, x: x + fabric.world_size, 2) == 3


def test_a_subclass_may_have_a_method_run() -> None:
    class Lite(Fabric):
        def run(self, value):
            return self.to_device(torch.tensor(value))

    assert Lite(accelerator="cpu").run(3) == 3


def test_a_file_at_a_url(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    url, fabric = f"memory://{uuid.uuid4().hex}/a.ckpt", Fabric(accelerator="cpu")
    fabric.save(url, {"step": 3, "weight": torch.ones(2)})
    assert not list(tmp_path.iterdir())
    loaded = fabric.load(url)
    assert (loaded["step"], loaded["weight"].tolist()) == (3, [1.0, 1.0])
    with pytest.raises(TypeError, match=r"filter\['step'\] needs a dict, but state\['step'\] is an int"):
        fabric.save(url, {"step": 3}, filter={"step": lambda key, value: True})
