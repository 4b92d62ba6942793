"""`Trainer(profiler=...)`: what is measured is what ran; without one nothing is replaced."""

import copy
import itertools
import json
import pickle
import pstats
import time

import pytest
import torch
from support.models import SGDTask
from support.processes import run
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from treadle.engine.profilers.simple import Action, DeviceClock, verdict

import treadle as tl
from treadle.profilers import AdvancedProfiler, PassThroughProfiler, Profiler, PyTorchProfiler, SimpleProfiler


class Net(SGDTask):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0]).mean())


class Sleeper(tl.Callback):
    """Sleeps in a hook."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        time.sleep(self.seconds)


def loader(count=16, **options):
    return DataLoader(TensorDataset(torch.randn(count, 4)), 2, **options)


def trainer_in(root, **flags):
    defaults = {"max_epochs": 1, "logger": False, "accelerator": "cpu"}
    off = {f"enable_{name}": False for name in ("progress_bar", "checkpointing", "model_summary")}
    return tl.Trainer(default_root_dir=root, **off, **{**defaults, **flags})


class Notes(Profiler):
    """Writes down what begins and ends."""

    def __init__(self):
        super().__init__()
        self.events = []

    def start(self, action_name):
        self.events.append(("start", action_name))

    def stop(self, action_name):
        self.events.append(("stop", action_name))

    def step(self):
        self.events.append(("step", ""))


@pytest.mark.parametrize("method", ["start", "stop", "step", "summary"])
def test_a_profiler_that_fails_does_not_end_training(method, tmp_path, recwarn):
    class Broken(Notes):
        strict = False

    def fail(self, *args):
        raise OSError("disk full")

    setattr(Broken, method, fail)
    trainer = trainer_in(tmp_path, profiler=Broken())
    trainer.fit(Net(), loader(), loader())
    assert trainer.global_step == 8
    name = "describe" if method == "summary" else method
    warned = [str(w.message) for w in recwarn if "profiler" in str(w.message)]
    assert warned == [f"Broken.{name} failed, so the profiler is disabled: OSError: disk full"]
    Broken.strict = True
    with pytest.raises(OSError, match="disk full"):
        trainer_in(tmp_path, profiler=Broken()).fit(Net(), loader())


# -- what the Trainer measures ------------------------------------------------------------------------------------


def test_every_phase_is_measured_in_order_and_properly_nested(tmp_path):
    notes = Notes()
    trainer = trainer_in(
        tmp_path, profiler=notes, callbacks=[Sleeper()], log_every_n_steps=2, accumulate_grad_batches=2,
        gradient_clip_val=1.0, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(Net(), loader(8), loader(4))
    stack, seen = [], []
    for kind, name in notes.events:
        if kind == "start":
            stack.append(name)
            seen.append(name)
        elif kind == "stop":
            assert stack.pop() == name
    assert stack == []
    first = seen[seen.index("data") :]
    hook = "hook Sleeper.on_train_batch_end"
    micro = ["data", "forward", "backward"]
    assert first[:10] == [*micro, hook, *micro, "agree", "clip", "optimizer"]
    assert first[10:14] == ["zero_grad", hook, *micro[:2]]
    counts = {name: seen.count(name) for name in set(seen)}
    assert counts["forward"] == counts["backward"] == counts[hook] == 4
    assert counts["optimizer"] == counts["zero_grad"] == counts["clip"] == 2
    assert counts["data"] == 5  # and the end of the epoch
    assert counts["validation"] == counts["training"] == counts["logging by step"] == 1
    assert counts["validation_step"] == 2
    assert [kind for kind, _ in notes.events].count("step") == 2


def test_nothing_is_left_behind_and_nothing_there_without_one(tmp_path):
    seen = {}

    class Look(tl.Callback):
        def on_train_batch_end(self, trainer, task, *rest):
            accelerator = trainer.accelerator
            owners = (
                accelerator,
                accelerator.accumulation,
                accelerator.strategy,
                accelerator.optimizers[0],
                trainer.logbook,
                trainer.sources.train,
            )
            seen.setdefault(trainer.profiled is not None, {name for owner in owners for name in vars(owner)})

    for profiler in (None, SimpleProfiler()):
        trainer = trainer_in(tmp_path, profiler=profiler, callbacks=[Look()])
        task = Net()
        trainer.fit(task, loader(), loader())
        assert trainer.profiled is None
        assert not {"method", "save_state", "prepare_optimizer"} & set(vars(trainer.accelerator))
        assert "backward" not in vars(trainer.accelerator.accumulation)
        assert not {"write_step", "write_row"} & set(vars(trainer.logbook))
        trainer.fit(task, loader(), loader())
    assert seen[True] - seen[False] >= {"backward", "method", "step", "write_row", "_begin"}
    assert isinstance(trainer_in(tmp_path).profiler, PassThroughProfiler)


def test_training_is_the_same_with_and_without(tmp_path):
    states = []
    for profiler in (None, "simple", "advanced", PyTorchProfiler(schedule=None, export_to_chrome=False)):
        tl.seed_everything(1)
        task = Net()
        trainer_in(tmp_path, profiler=profiler).fit(task, loader(shuffle=True), loader())
        states.append(task.state_dict())
    for state in states[1:]:
        assert all(torch.equal(state[name], states[0][name]) for name in state)


class Slow(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        time.sleep(0.003)
        return (torch.ones(4),)


@pytest.mark.parametrize("waits", ["data", "hook"])
def test_the_verdict_names_what_the_run_waits_for(waits, tmp_path, capsys):
    data = DataLoader(Slow() if waits == "data" else Fast(), 2)
    callback = Sleeper(0.0 if waits == "data" else 0.006)
    profiler = SimpleProfiler()
    trainer_in(tmp_path, profiler=profiler, callbacks=[callback]).fit(Net(), data)
    text = capsys.readouterr().err
    action = profiler.actions["data" if waits == "data" else "hook Sleeper.on_train_batch_end"]
    assert action.exclusive >= 12 * 0.006  # it can't be shorter than it slept
    assert "Profile of fit" in text
    if waits == "data":
        assert "this run waits for data" in text
        assert "The dataloader reads in this process. Set num_workers" in text
    else:
        assert "of the time in hook Sleeper.on_train_batch_end" in text


def test_the_advice_of_an_evaluation_is_that_of_its_own_dataloader(tmp_path, capsys):
    trainer_in(tmp_path, profiler="simple").validate(Net(), DataLoader(Slow(), 2))
    text = capsys.readouterr().err
    assert "this run waits for data" in text
    assert "The dataloader reads in this process. Set num_workers" in text


class Fast(Slow):
    def __getitem__(self, index):
        return (torch.ones(4),)


def test_each_stage_has_its_report_also_one_that_fails(tmp_path, capsys):
    trainer = trainer_in(tmp_path, profiler="simple")
    trainer.fit(Net(), loader(), loader())
    trainer.validate(dataloaders=loader())
    assert {"validation_step", "data of validate"} <= set(trainer.profiler.actions)
    text = capsys.readouterr().err
    assert text.index("Profile of fit") < text.index("Profile of validate")

    class Broken(Net):
        def training_step(self, batch, batch_idx):
            with self.trainer.profiler.profile("broken"):
                raise RuntimeError("here")

    trainer = trainer_in(tmp_path, profiler="simple")
    with pytest.raises(RuntimeError, match="here"):
        trainer.fit(Broken(), loader())
    assert "broken" in capsys.readouterr().err
    assert trainer.profiled is None


# -- the simple one -----------------------------------------------------------------------------------------------


def test_own_time_is_without_what_lies_within(monkeypatch):
    clock = itertools.chain([0.0, 1.0, 3.0, 6.0, 10.0])  # made; a start; b start; b stop; a stop
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    profiler = SimpleProfiler()
    profiler.start("a")
    profiler.start("b")
    profiler.stop("b")
    profiler.stop("a")
    a, b = profiler.actions["a"], profiler.actions["b"]
    assert (a.total, a.exclusive, b.total, b.exclusive) == (9.0, 6.0, 3.0, 3.0)


def test_an_action_within_itself_counts_once_in_the_total(monkeypatch):
    clock = itertools.chain([0.0, 1.0, 2.0, 4.0, 7.0, 10.0])  # made; a, b, a start; a, b stop
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    profiler = SimpleProfiler()
    for name in ("a", "b", "a"):
        profiler.start(name)
    profiler.stop("a")
    profiler.stop("b")
    monkeypatch.setattr(time, "perf_counter", lambda: 20.0)
    profiler.stop("a")
    a, b = profiler.actions["a"], profiler.actions["b"]
    assert (a.calls, a.total, a.exclusive, b.total, b.exclusive) == (2, 19.0, 14.0, 8.0, 5.0)


def test_wrong_calls_are_errors():
    for other in (SimpleProfiler(), AdvancedProfiler(), PyTorchProfiler()):
        with pytest.raises(ValueError, match=r"stop\('b'\) was called, but no action"):
            other.stop("b")


def test_by_hand_and_into_a_file(tmp_path):
    profiler = SimpleProfiler(tmp_path, "times")
    assert list(profiler.profile_iterable([1, 2], "items")) == [1, 2]
    with profiler.profile("block"):
        pass
    profiler.describe()
    text = (tmp_path / "times.txt").read_text()
    assert profiler.actions["items"].calls == 3
    assert "block" in text
    assert "longest" in text
    assert "longest" not in SimpleProfiler(extended=False).summary() + "".join(profiler.summary().split("longest")[:1])


class Mark:
    """A device's event as CUDA's are: reached once the work before it is done; the test tells the time."""

    now = 0.0
    done = 0.0

    def record(self):
        self.at = Mark.now

    def query(self):
        return self.at <= Mark.done

    def synchronize(self):
        Mark.done = max(Mark.done, self.at)

    def elapsed_time(self, other):
        return other.at - self.at


def test_the_devices_clock_is_read_late_and_never_waited_for():
    taken = []
    clock = DeviceClock(Mark, lambda *what: taken.append(what))
    outer = clock.start("step", None)
    Mark.now = 10.0
    inner = clock.start("forward", outer)
    Mark.now = 40.0
    clock.stop(inner)
    Mark.now = 100.0
    clock.stop(outer)
    clock.read(wait=False)
    assert taken == []  # the device is behind
    Mark.done = 50.0
    clock.read(wait=False)
    assert taken == [("forward", 0.03, 0.03)]
    clock.read(wait=True)
    assert taken[1] == ("step", 0.1, 0.07)
    outer = clock.start("step", None)
    inner = clock.start("step", outer)
    Mark.now = 120.0
    clock.stop(inner)
    clock.stop(outer)
    clock.read(wait=True)
    assert taken[2:] == [("step", 0.0, 0.02), ("step", 0.02, 0.0)]  # the whole is counted once


def action(own, calls=10, first=0.0, device=0.0):
    one = Action()
    one.exclusive = one.total = own
    one.calls, one.first, one.device_exclusive = calls, first, device
    return one


def test_the_verdict_leaves_out_what_only_happens_once():
    actions = {"data": action(5.0, first=4.9), "forward": action(1.0)}
    assert verdict(actions, {}, False).startswith("Verdict: this run computes 91 % of the time and waits for data 9 %")
    actions["data"] = action(3.0)
    assert (
        verdict(actions, {"data": "Do this."}, False) == "Verdict: this run waits for data 75 % of the time. Do this."
    )
    on_device = {"data": action(3.0, device=0.1), "forward": action(0.1, device=0.9)}
    assert verdict(on_device, {}, True).startswith("Verdict: the device computes 90 % of the time")
    assert verdict({"block": action(1.0)}, {}, False) == ""


# -- the others ---------------------------------------------------------------------------------------------------


def test_advanced_counts_each_function_once_where_it_is_called(tmp_path):
    profiler = AdvancedProfiler(tmp_path, dump_stats=True)

    def inner():
        pass

    def outer():
        with profiler.profile("inner"):
            inner()

    profiler.start("outer")
    outer()
    outer()
    profiler.stop("outer")
    text = profiler.summary()
    assert "Profile of outer" in text
    functions = {
        name: {key[2]: calls[0] for key, calls in pstats.Stats(str(tmp_path / f"{name}.prof")).stats.items()}
        for name in ("outer", "inner")
    }
    assert functions["inner"]["inner"] == 2
    assert "inner" not in functions["outer"]
    pickle.dumps(AdvancedProfiler())


def test_pytorch_writes_a_trace_with_steps_actions_and_parts(tmp_path, capsys):
    profiler = PyTorchProfiler(
        tmp_path, filename="net", schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    )
    task = Net()
    trainer_in(tmp_path, profiler=profiler).fit(task, loader())
    names = [event["name"] for event in json.loads(profiler.traces[0].read_text())["traceEvents"]]
    assert [name for name in names if name.startswith("ProfilerStep")] == ["ProfilerStep#2", "ProfilerStep#3"]
    for expected in ("[treadle]forward", "[treadle]backward", "[treadle]optimizer", "aten::linear"):
        assert names.count(expected) == 2
    assert names.count("[treadle][module]torch.nn.modules.linear.Linear: net") == 2
    assert [path.name for path in tmp_path.glob("*.json")] == ["fit-net.pt.trace.json"]
    assert "aten::linear" in (tmp_path / "fit-net.txt").read_text()
    assert not task.net._forward_hooks


def test_pytorch_says_if_it_recorded_nothing(tmp_path):
    with pytest.warns(UserWarning, match="recorded nothing: fit ended after 1 step,"):
        trainer_in(tmp_path, profiler="pytorch", max_steps=1).fit(Net(), loader())


@pytest.mark.skipif(torch.cuda.is_available(), reason="is allowed there")
def test_nvtx_needs_a_device(tmp_path):
    with pytest.raises(ValueError, match=r"emit_nvtx=True.*CUDA"):
        trainer_in(tmp_path, profiler=PyTorchProfiler(emit_nvtx=True)).fit(Net(), loader())


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ("simpel", ValueError, "Did you mean 'simple'"),
        ("xla", ValueError, "TPUs are not supported"),
        (SimpleProfiler, TypeError, r"Pass SimpleProfiler\(\)"),
        (3, TypeError, "must be a profiler's name"),
    ],
    ids=["misspelt", "xla", "class", "number"],
)
def test_wrong_profilers(asked, error, words):
    with pytest.raises(error, match=words):
        tl.Trainer(profiler=asked, accelerator="cpu")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"sort_by_key": "cpu_tim"}, ValueError),
        ({"record_shape": True}, ValueError),
        ({"table_kwargs": {"row_limit": 3}}, ValueError),
        ({"schedule": 3}, TypeError),
    ],
    ids=["key", "argument", "table", "schedule"],
)
def test_wrong_arguments_of_pytorch(options, error):
    with pytest.raises(error):
        PyTorchProfiler(**options)


def on_two(root):
    tl.seed_everything(0)  # one dataset on both ranks
    trainer = trainer_in(root, devices=2, strategy="ddp", profiler=SimpleProfiler(filename="times"))
    trainer.fit(Net(), loader(), loader())
    trainer_in(root, devices=2, strategy="ddp", profiler="pytorch").fit(Net(), loader(24))
    return trainer.profiler.actions["backward"].calls


def test_two_processes_write_a_file_each(tmp_path):
    assert run(on_two, 2, str(tmp_path)) == [4, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "fit-0.pt.trace.json", "fit-1.pt.trace.json", "fit-times-0.txt", "fit-times-1.txt",
    ]  # fmt: skip


def test_names_that_programs_read_from_the_profilers(tmp_path):
    profiler = SimpleProfiler()
    with profiler.profile("outer"):
        assert list(profiler.current_actions) == ["outer"]
        for _ in range(3):
            with profiler.profile("inner"):
                pass
    durations = profiler.recorded_durations
    assert {name: len(values) for name, values in durations.items()} == {"outer": 1, "inner": 3}
    assert sum(durations["inner"]) == pytest.approx(profiler.actions["inner"].total)
    assert profiler.current_actions == {}
    assert profiler.start_time <= time.perf_counter() - sum(durations["outer"])
    assert type(tl.Trainer(accelerator="cpu", profiler="Simple", logger=False).profiler) is SimpleProfiler

    recorder = PyTorchProfiler(dirpath=tmp_path, schedule=None)
    assert recorder.function_events is None
    recorder.setup("fit")
    torch.ones(2, 2) @ torch.ones(2, 2)
    recorder.describe()
    assert any(event.name == "aten::mm" for event in recorder.function_events)


def test_pytorch_records_actions_outside_of_a_trainer(tmp_path):
    recorder = PyTorchProfiler(dirpath=tmp_path, filename="x", schedule=None, table_kwargs={"max_name_column_width": 5})
    with recorder.profile("alone"):
        torch.ones(2, 2) @ torch.ones(2, 2)
    recorder.describe()
    assert {"[treadle]alone", "aten::mm"} <= {event.name for event in recorder.function_events}
    assert "alone" in recorder.summary() or "[t..." in recorder.summary()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.pt.trace.json", "x.txt"]
    copy.deepcopy(recorder)
    trainer_in(tmp_path, profiler=recorder).fit(Net(), loader())  # a recording that nobody ended is no obstacle
    with recorder.profile("after"):  # and a stage's is not begun again by what comes after it
        pass
    assert recorder.profiler is None
