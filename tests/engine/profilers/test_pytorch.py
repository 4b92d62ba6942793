"""PyTorchProfiler: traces, and arguments that are wrong."""

import copy
import json

import pytest
import torch
from support.profiled import Net, loader, trainer_in

from treadle.profilers import PyTorchProfiler


def test_pytorch_writes_a_trace_with_steps_actions_and_parts(tmp_path, capsys):
    profiler = PyTorchProfiler(
        tmp_path, filename="net", row_limit=-1, schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
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


WRONG = {"sort_by_key": "cpu_tim", "record_shape": True, "table_kwargs": {"row_limit": 3}, "schedule": 3}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_of_pytorch(name):
    with pytest.raises(TypeError if name == "schedule" else ValueError):
        PyTorchProfiler(**{name: WRONG[name]})


def test_pytorch_records_actions_outside_of_a_trainer(tmp_path):
    recorder = PyTorchProfiler(dirpath=tmp_path, filename="x", schedule=None, table_kwargs={"max_name_column_width": 5})
    assert recorder.function_events is None
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
