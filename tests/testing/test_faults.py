"""Planned faults strike where they say, once, and leave all as it was; a plan that did not strike is an error."""

import errno
import faulthandler
import itertools
import json
import os
import re
import signal
import sys
import time

import pytest
import torch
from support import stored
from support.launches import wait_for
from support.models import SGDTask, loader
from support.processes import RankError, run, script
from support.trainers import make_trainer
from torch import nn
from treadle.engine.checkpoint import filesystem, store
from treadle.strategies.processes import IDENTITY

import treadle
from treadle.testing import faults
from treadle.testing.faults import Fault, FaultInjected, FaultPlan, FaultsNotFired, forked


class Task(SGDTask):
    """The gradient of a step is 1 and so is the rate: after n steps the weight is -n."""

    lr = 1.0

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.net.weight)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return self(batch[0]).mean()

    def validation_step(self, batch, batch_idx):
        self(batch[0])


def by_trainer(task, world=1, **flags):
    """Three steps of two micro-batches, a validation after each."""
    trainer = make_trainer(**{"accumulate_grad_batches": 2, "val_check_interval": 2, **flags})
    trainer.fit(task, loader(6 * world, 1, 1), loader(world, 1, 1))
    assert trainer.global_step == 3
    return trainer


def by_own_loop(task, world=1):
    accelerator = treadle.Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = task.configure_optimizers()
    model, optimizer, batches = accelerator.prepare(task, optimizer, loader(6 * world, 1, 1))
    for (x,) in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(x)
    assert accelerator.steps == 3


DOORS = {"trainer": by_trainer, "own loop": by_own_loop}

# Point, occurrence in the second step, and the weight and gradient at that moment, worked out by hand.
MOMENTS = [
    ("forward", 1, -1.0, None),
    ("forward:after", 1, -1.0, None),
    ("forward", 2, -1.0, 0.5),
    ("forward:after", 2, -1.0, 0.5),
    ("backward", 2, -1.0, 0.5),
    ("backward:after", 2, -1.0, 1.0),
    ("step", 1, -1.0, 1.0),
    ("step:after", 1, -2.0, 1.0),
]
HOOKED = [
    ("callback:on_train_batch_start", 1, -1.0, None),
    ("callback:on_train_batch_start", 2, -1.0, 0.5),
    ("callback:on_before_optimizer_step", 1, -1.0, 1.0),
    ("callback:on_before_zero_grad:after", 1, -2.0, 1.0),
    ("callback:on_train_batch_end", 2, -2.0, None),
    ("callback:on_validation_batch_start", 1, -2.0, None),
    ("callback:on_step_end:after", 1, -2.0, None),
]


def moments(door):
    return MOMENTS + (HOOKED if door == "trainer" else [])


def observe(door, rank=None):
    """What a process sees at each moment, and in which order the moments come."""
    task, seen = Task(), []

    def look(firing):
        gradient = task.net.weight.grad
        fault = plan.faults[firing.fault]
        here = (fault.point, fault.occurrence, task.net.weight.item(), None if gradient is None else gradient.item())
        seen.append((firing.rank, firing.step, *here))

    plan = FaultPlan([Fault(p, look, rank=rank, step=2, occurrence=n) for p, n, _, _ in moments(door)])
    with plan:
        DOORS[door](task, int(os.environ.get("WORLD_SIZE", "1")))
    assert len(plan.firings) == len(seen)
    return seen


def expected(door, rank):
    return {
        (rank, 2, point if point.endswith("after") else f"{point}:before", number, weight, gradient)
        for point, number, weight, gradient in moments(door)
    }


@pytest.mark.parametrize("door", DOORS)
def test_each_point_is_where_it_says(door):
    seen = observe(door)
    assert set(seen) == expected(door, 0)
    order = [(point, number) for _, _, point, number, _, _ in seen if not point.startswith("callback")]
    assert order == [(p if ":" in p else f"{p}:before", n) for p, n, _, _ in MOMENTS]


@pytest.mark.long
@pytest.mark.parametrize("door", DOORS)
def test_each_point_of_one_of_two_processes(door):
    first, second = run(observe, 2, door, 1)
    assert (set(first), set(second)) == (set(), expected(door, 1))


def counts(door, world=1):
    """How often each point is passed, by the n-th fault that strikes there."""
    points = ("forward:before", "forward:after", "backward:before", "backward:after", "step:before", "step:after")
    struck = []
    plan = FaultPlan(
        [Fault(p, lambda firing: struck.append(firing.point), occurrence=n) for p in points for n in range(1, 8)]
    )
    with pytest.raises(FaultsNotFired), plan:
        DOORS[door](Task(), world)
    return [struck.count(point) for point in points]


@pytest.mark.parametrize("door", DOORS)
def test_a_point_is_passed_once_for_each_micro_batch_or_step_and_never_in_evaluation(door):
    assert counts(door) == [6, 6, 6, 6, 3, 3]


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
@pytest.mark.parametrize("how", ["before prepare", "in place", "after prepare"])
def test_compiled_models_too(how):
    accelerator, model = treadle.Accelerator(cpu=True), nn.Linear(1, 1)
    if how == "before prepare":
        model = torch.compile(model, backend="eager")
    elif how == "in place":
        model.compile(backend="eager")
    model = accelerator.prepare(model)
    if how == "after prepare":
        model = torch.compile(model, backend="eager")
    points = ["forward:before", "forward:after"]
    seen = []
    with FaultPlan([Fault(point, seen.append, occurrence=n) for n in (1, 2) for point in points]):
        for _ in range(2):
            model(torch.ones(1, 1))
    assert [firing.point for firing in seen] == points * 2


def test_a_run_that_goes_on_counts_on(tmp_path):
    trainer = by_trainer(Task())
    trainer.save_checkpoint(tmp_path / "c")
    plan = FaultPlan([Fault(point, step=5) for point in ("backward", "callback:on_train_batch_start")])
    with pytest.raises(FaultInjected, match="fault 1, callback:on_train_batch_start:before on rank 0 in step 5"), plan:
        make_trainer(max_epochs=2, accumulate_grad_batches=2).fit(
            Task(), loader(6, 1, 1), loader(1, 1, 1), ckpt_path=tmp_path / "c"
        )
    trainer.max_epochs = 2
    with pytest.raises(FaultInjected, match="fault 0, backward:before on rank 0 in step 5"), plan:
        trainer.fit(Task(), loader(6, 1, 1), loader(1, 1, 1))
    assert [firing.fault for firing in plan.firings] == [1, 0]
    plan.check()


# -- what happens ----------------------------------------------------------------------------------------------------

STOPS = {"raise": 1, "exit:3": 3, "exit": 1, "kill": -9, "kill:SIGTERM": -15, "kill:SIGSEGV": -11}
EVERYWHERE = ["forward", "forward:after", "backward", "backward:after", "step", "step:after"]


STRUCK = (*EVERYWHERE, "callback:on_train_batch_end", "callback:on_step_end:after", "disk:*")


@pytest.mark.parametrize(("point", "action"), list(zip(STRUCK, itertools.cycle(STOPS))))
def test_each_action_at_each_point(tmp_path, action, point):
    flags = {"enable_checkpointing": True, "default_root_dir": tmp_path / "runs"} if "disk" in point else {}
    done = tmp_path / "done"
    record = tmp_path / "record"
    fault = Fault(point, action, step=3 if "disk" in point else 2)

    def work():
        faulthandler.disable()  # pytest's would print a stack for each segmentation fault
        by_own_loop(Task()) if point in EVERYWHERE else by_trainer(Task(), **flags)
        done.touch()

    leaves = action == "kill:SIGTERM" and point not in EVERYWHERE  # the Trainer does, with its status
    assert forked(work, fault, record=record) == (143 if leaves else STOPS[action])
    assert not done.exists()
    (firing,) = FaultPlan([fault], record=record).firings
    assert (firing.rank, firing.step, firing.pid != os.getpid()) == (0, fault.step, True)


def test_exceptions_by_name_class_and_instance():
    own = LookupError("this one")
    for action, kind in (
        ("raise", FaultInjected),
        ("raise:KeyboardInterrupt", KeyboardInterrupt),
        (ZeroDivisionError, ZeroDivisionError),
        (own, LookupError),
    ):
        with pytest.raises(kind) as caught, FaultPlan([Fault("backward", action, step=2)]):
            by_own_loop(Task())
        if action is own:
            assert caught.value is own
        else:
            assert str(caught.value) == "planned: fault 0, backward:before on rank 0 in step 2"


def test_delays_and_hangs_go_on(tmp_path):
    for action in ("delay:0.2", "hang:0.2"):
        start = time.monotonic()
        with FaultPlan([Fault("step", action, step=1)]):
            by_own_loop(Task())
        assert time.monotonic() - start > 0.2
    child = os.fork()
    if child == 0:
        try:
            with FaultPlan([Fault("step", "hang")], record=tmp_path / "record"):
                by_own_loop(Task())
        finally:
            os._exit(1)
    wait_for(lambda: (tmp_path / "record").exists() and (tmp_path / "record").read_text(), 20)
    time.sleep(0.2)
    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_signal_reaches_its_handler_and_the_run_goes_on():
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    try:
        with FaultPlan([Fault("forward", "kill:SIGUSR1", step=2)]):
            by_own_loop(Task())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [1]


# -- the disk --------------------------------------------------------------------------------------------------------

STATE = {"weight": torch.arange(64.0)}


def save(target, value=0.0):
    files = stored.write_part(target, "model", {"weight": STATE["weight"] + value})
    files |= stored.write_part(target, "state", {"value": value})
    return stored.commit(target, files, {"step": 1})


WRITES = {
    "write_bytes": (b"12345678",),
    "write_tensors": (STATE, {}),
    "write_stream": (lambda file: file.write(b"12345678"),),
}
MAKING = {"mkdir", *WRITES}


@pytest.mark.parametrize("point", [point for point in faults.POINTS if point.startswith("disk:")])
def test_each_disk_point(tmp_path, point):
    """The operation is seen not to have happened, or to have happened by half, or to have happened."""
    _, operation, moment = point.split(":")
    path, other = tmp_path / "x", tmp_path / "y"
    if operation in ("rename", "rmdir"):
        path.mkdir()
    elif operation in ("unlink", "fsync", "replace"):
        path.write_bytes(b"1234")
    arguments = (WRITES | {"rename": (other,), "replace": (other,)}).get(operation, ())
    with pytest.raises(OSError, match="No space left") as caught, FaultPlan([Fault(point, "oserror:ENOSPC")]):
        getattr(filesystem, operation)(path, *arguments)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    if operation != "fsync":
        assert path.exists() == ((operation in MAKING) == (moment != "before"))
    if moment == "half":
        half = path.stat().st_size
        path.unlink()
        getattr(filesystem, operation)(path, *arguments)
        assert half == path.stat().st_size // 2 > 0


@pytest.mark.parametrize("operation", WRITES)
def test_what_was_only_delayed_half_way_is_whole(tmp_path, operation):
    found = []
    with FaultPlan([Fault(f"disk:{operation}:half", lambda firing: found.append(os.stat(firing.path)))]):
        entry = getattr(filesystem, operation)(tmp_path / "x", *WRITES[operation])
    written = filesystem.describe(tmp_path / "x")
    assert [half.st_size for half in found] == [written["bytes"] // 2]
    assert found[0].st_ino == (tmp_path / "x").stat().st_ino  # by which a launcher knows whose half a file it removes
    assert entry in (None, written)


def test_a_file_can_be_named(tmp_path):
    faulty = [
        Fault("disk:write_*", "oserror:EACCES", match="*/manifest.json"),
        Fault("disk:rename", "oserror", match="*/last"),
        Fault("disk:rename:after", match="*/.last.*.part"),
    ]
    plan = FaultPlan(faulty)
    for kind in (PermissionError, OSError, FaultInjected):
        with pytest.raises(kind), plan:
            save(tmp_path / "last")
    plan.check()
    part = store.get_staging_path(tmp_path / "last").name
    assert [os.path.basename(firing.path) for firing in plan.firings] == ["manifest.json", part, part]


@pytest.mark.long
def test_every_disk_point_of_a_save_is_listed_and_struck_in_turn(tmp_path):
    save(tmp_path / "a" / "last")
    points = faults.disk_points(lambda: save(tmp_path / "a" / "last", 1.0))
    assert [p.number for p in points if p.moment == "half"] == [1, 2, 3]
    halves = [os.path.basename(p.path) for p in points if p.moment == "half"]
    assert halves == ["model.safetensors", "state.json", "manifest.json"]
    assert len(points) > 30
    found = set()
    for number, point in enumerate(points):
        target = tmp_path / f"b{number}" / "last"
        save(target)
        record = tmp_path / f"record{number}"
        assert forked(lambda target=target: save(target, 1.0), point.fault(), record=record) == -9
        (firing,) = FaultPlan([point.fault()], record=record).firings
        assert firing.point == f"disk:{point.operation}:{point.moment}"
        struck, listed = os.path.relpath(firing.path, target.parent), os.path.relpath(point.path, tmp_path / "a")
        assert re.sub(IDENTITY, "", struck) == re.sub(IDENTITY, "", listed)  # the process is another one
        path, _ = store.CheckpointStore(target.parent).latest()
        found.add(stored.read_part(path, "state")["value"])
    assert found == {0.0, 1.0}
    beyond = points[-1].fault()
    beyond = Fault(beyond.point, "kill", occurrence=beyond.occurrence + 1)
    save(tmp_path / "c")
    assert forked(lambda: save(tmp_path / "c", 1.0), beyond) == 1  # FaultsNotFired, printed


# -- exactly once ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        Fault("backward", step=4),
        Fault("step", step=2, occurrence=2),
        Fault("callback:on_test_start"),
        Fault("disk:*"),
        Fault("forward", step=0),
        Fault("backward", rank=1),
    ],
    ids=str,
)
def test_a_fault_that_does_not_happen_is_an_error(fault):
    with pytest.raises(FaultsNotFired) as caught, FaultPlan([Fault("backward", "delay:0"), fault]) as plan:
        by_trainer(Task())
    assert str(fault) in str(caught.value)
    assert "fault 0" not in str(caught.value)
    with pytest.raises(FaultsNotFired, match=r"fault 1, .* happened 0 times"):
        plan.check()


def test_another_error_is_not_hidden_by_what_did_not_happen():
    with pytest.raises(KeyError, match="mine"), FaultPlan([Fault("step")]):
        raise KeyError("mine")


def test_a_fault_is_spent():
    plan = FaultPlan([Fault("backward")])
    with pytest.raises(FaultInjected), plan:
        by_own_loop(Task())
    with plan:
        by_own_loop(Task())
    plan.check()
    with pytest.raises(ValueError, match="planned twice"):
        FaultPlan([Fault("backward"), Fault("backward:before")])
    with pytest.raises(ValueError, match="needs at least one fault"):
        FaultPlan([])
    with pytest.raises(TypeError, match="must consist of Faults"):
        FaultPlan(["backward"])
    with pytest.raises(RuntimeError, match="already armed"), plan, plan:
        pass


def test_a_record_holds_over_kills_and_restarts(tmp_path):
    record, log = tmp_path / "record", tmp_path / "log"
    planned = [Fault("backward", "kill", step=2), Fault("step:after", "exit:7", step=3), Fault("disk:rename", "kill")]
    plan = FaultPlan(planned, record=record)

    def work():
        by_own_loop(Task())
        save(tmp_path / "c")
        log.write_text("done")

    for status, left in ((-9, 2), (7, 1), (-9, 0)):
        assert forked(work, *planned, record=record) == status
        assert len(plan.firings) == 3 - left
        if left:
            with pytest.raises(FaultsNotFired) as caught:
                plan.check()
            assert str(caught.value).count("happened 0 times") == left
    assert not log.exists()
    assert forked(work, *planned, record=record) == 0
    assert log.read_text() == "done"
    plan.check()
    assert len({firing.pid for firing in plan.firings}) == 3
    record.write_text(record.read_text() * 2)
    with pytest.raises(FaultsNotFired, match="happened 2 times"):
        plan.check()
    with pytest.raises(ValueError, match="another plan"):
        FaultPlan([Fault("step")], record=record).check()


def plan_of_two(record, action):
    return FaultPlan([Fault("backward", action, rank=1, step=2), Fault("step", "delay:0")], record=record)


def struck(record, action):
    with plan_of_two(record, action):
        by_trainer(Task(), world=2)


@pytest.mark.long
@pytest.mark.parametrize(
    "action", ["kill", *(pytest.param(other, marks=pytest.mark.slow) for other in ("exit:3", "raise"))]
)
def test_of_two_processes_one_is_struck_and_the_restart_goes_through(tmp_path, action):
    record = tmp_path / "record"
    words = {"kill": "rank 1 .* was killed by SIGKILL", "exit:3": "rank 1 .* exited with status 3", "raise": "planned"}
    with pytest.raises((RankError, FaultInjected), match=words[action]):
        run(struck, 2, record, action)
    run(struck, 2, record, action)
    plan = plan_of_two(record, action)
    plan.check(world_size=2)
    assert len(plan.firings) == 3
    with pytest.raises(FaultsNotFired, match=r"fault 1, .* happened 1 time on rank 1"):
        plan.check()  # there was but one process, says who calls it so


# -- nothing stays behind --------------------------------------------------------------------------------------------


def everything():
    """All that Treadle's modules and classes hold, and torch's hooks for all modules and optimizers."""
    held = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith("treadle.") or module is None:
            continue
        for key, value in vars(module).items():
            held[name, key] = value
            if isinstance(value, type) and value.__module__.startswith("treadle."):
                held.update({(value.__qualname__, part): inner for part, inner in vars(value).items()})
    for module in (sys.modules["torch.nn.modules.module"], sys.modules["torch.optim.optimizer"]):
        tables = {key: table for key, table in vars(module).items() if key.startswith("_global_") and table}
        held.update({(key, number): hook for key, table in tables.items() for number, hook in table.items()})
    return held


def differences(a, b):
    return sorted(f"{key[0]}.{key[1]}" for key in a.keys() | b.keys() if a.get(key, a) is not b.get(key, b))


ALL = [Fault(point, "delay:0") for point in ("forward", "backward", "step", "callback:*", "disk:*")]


@pytest.mark.parametrize("how", ["returns", "raises", "fails to arm"])
def test_everything_is_put_back(tmp_path, how, monkeypatch):
    task = Task()
    by_trainer(task)  # everything is imported
    own = dict(vars(Task))
    before = everything()
    if how == "fails to arm":
        monkeypatch.setattr(faults.Places, "_wrap_operation", lambda self, name: 1 / 0)
        with pytest.raises(TypeError), FaultPlan(ALL):
            pass
        monkeypatch.undo()
    elif how == "raises":
        with pytest.raises(FaultInjected), FaultPlan([*ALL, Fault("step", step=2)]):
            by_trainer(task)
    else:
        with FaultPlan(ALL):
            armed = differences(before, everything())
            trainer = by_trainer(task, enable_checkpointing=True, default_root_dir=tmp_path)
            assert trainer.hooks.on_step_end
        replaced = {"Accumulation.backward", "Hooks.__init__", "Accelerator.prepare_model", "Accelerator.method"}
        assert replaced < set(armed)
        assert {f"treadle.engine.checkpoint.filesystem.{name}" for name in faults.OPERATIONS} < set(armed)
        assert len(armed) == 4 + len(faults.OPERATIONS) + 5
        hooks = [hook for called in vars(trainer.hooks).values() if isinstance(called, list | tuple) for hook in called]
        assert not [
            hook for hook in hooks if "treadle.testing" in getattr(getattr(hook, "func", hook), "__module__", "")
        ]
    assert differences(before, everything()) == []
    assert dict(vars(Task)) == own
    assert "forward" not in vars(task)
    assert not task._forward_hooks


def test_only_what_is_needed_is_replaced():
    before = everything()
    with pytest.raises(FaultsNotFired), FaultPlan([Fault("disk:rename")]):
        armed = differences(before, everything())
    assert not [name for name in armed if "_global_" in name or "prepare_model" in name]


def test_plans_within_plans():
    seen = []
    with FaultPlan([Fault("backward", seen.append, step=3)]), FaultPlan([Fault("backward", seen.append, step=2)]):
        by_own_loop(Task())
    assert [firing.step for firing in seen] == [2, 3]


def test_a_scheduler_made_while_armed_steps_an_optimizer_that_no_plan_watches_any_more():
    accelerator = treadle.Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    with FaultPlan([Fault("step", "delay:0")]):
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        accelerator.backward(model(torch.ones(1, 1)).mean())
        optimizer.step()
    optimizer.step()
    assert accelerator.steps == 2


def test_nobody_who_does_not_ask_for_it_imports_it():
    done = script("import sys, treadle; treadle.Trainer, treadle.Accelerator; print(sorted(sys.modules))")
    assert done.returncode == 0, done.stderr
    assert "treadle.trainer" in done.stdout
    assert "treadle.testing" not in done.stdout


# -- what can be planned ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"point": "backwards"}, ValueError, "point='backwards' matches none.* Did you mean 'backward:before'"),
        ({"point": "disk:rename:half"}, ValueError, "point='disk:rename:half' matches none"),
        ({"point": 3}, TypeError, "point=3 must be a name"),
        ({"action": "explode"}, ValueError, "'explode' is not one of raise, kill"),
        ({"action": "kill:SIGTREM"}, ValueError, "Did you mean 'SIGTERM'"),
        ({"action": "raise:ValuError"}, ValueError, "Did you mean 'ValueError'"),
        ({"action": "exit:256"}, ValueError, "needs a number"),
        ({"action": "delay:-1"}, ValueError, "needs a number"),
        ({"action": "oserror:ENOSPC"}, ValueError, "is only for disk points"),
        ({"point": "disk:*", "action": "oserror:ENOSPCE"}, ValueError, "Did you mean 'ENOSPC'"),
        ({"action": 3}, TypeError, "action=3 must be"),
        ({"action": int}, TypeError, "must be a name, an exception or a function"),
        ({"rank": -1}, ValueError, "rank=-1 must be an integer of at least 0"),
        ({"occurrence": 0}, ValueError, "occurrence=0 must be an integer of at least 1"),
        ({"occurrence": True}, ValueError, "occurrence=True must be"),
        ({"match": "*/x"}, ValueError, "point='backward': match .* applies only to disk points"),
        ({"point": "disk:*", "match": 3}, ValueError, "match=3 .* match must be a pattern"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_wrong_word_is_an_error_that_names_the_right_one(arguments, error, words):
    with pytest.raises(error, match=words):
        Fault(**{"point": "backward", **arguments})


def test_the_disk_has_these_operations():
    """Every function of `disk` that changes something is a point: those that its docstring names."""
    assert all(f"`{name}`" in filesystem.__doc__ for name in faults.OPERATIONS)
    assert json.dumps(faults.POINTS).count("disk:") == 2 * len(faults.OPERATIONS) + 3
