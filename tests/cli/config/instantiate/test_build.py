"""Values become the arguments that annotations ask for, objects are built, defaults are written out."""

import dataclasses
import functools
import inspect
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import cli_samples
import pytest
import torch
from torch import nn
from treadle.cli.commands.yaml_dump import dump_yaml
from treadle.cli.config.instantiate import build
from treadle.cli.config.instantiate.buildable import Opaque
from treadle.cli.config.resolve import load
from treadle.cli.config.values import ConfigError, make_value
from treadle.trainer import settings
from treadle.trainer.core.signatures import described, signature

import treadle


def checked(text, *overrides, **known):
    return build.check(load([], overrides, earlier=("run.yaml", text)), **known)


MANY = "model: {class: cli_samples.Many, hidden: 3}\n"


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("hidden=5", "hidden", 5),
        ("mode=max", "mode", "max"),
        ("widths=[1, 2]", "widths", [1, 2]),
        ("widths=null", "widths", None),
        ("sizes={a: 1}", "sizes", {"a": 1}),
        ("where=a/b", "where", Path("a/b")),
        ("head={width: 3}", "head", cli_samples.Head(3)),
        ("head={class: cli_samples.Head, width: 3, bias: false}", "head", cli_samples.Head(3, False)),
        ("color=BLUE", "color", cli_samples.Color.BLUE),
        ("color=2", "color", cli_samples.Color.BLUE),
        ("activation=cli_samples.double", "activation", cli_samples.double),
        ("activation=torch.tanh", "activation", torch.tanh),
        ("layer=torch.nn.Conv2d", "layer", nn.Conv2d),
        ("layer=Conv2d", "layer", nn.Conv2d),
        ("name=1.10", "name", "1.10"),  # text, as it was written
        ("name=true", "name", "true"),
        ("pair=[3, 4]", "pair", (3, 4.0)),
        ("kind=bfloat16", "kind", torch.bfloat16),
        ("kind=torch.float16", "kind", torch.float16),
        ("amount=3", "amount", 3),
        ("amount=many", "amount", "many"),
        ("wrong_default=null", "wrong_default", None),
        ("strange=[1, {a: 2}]", "strange", [1, {"a": 2}]),
    ],
)
def test_values_become_arguments(override, name, value):
    given = checked(MANY, f"model.{override}").build_task().given[name]
    assert type(given) is type(value)
    assert given == value


def test_float_arguments_get_floats():
    assert checked("model: {class: cli_samples.Line, lr: 1}").build_task().lr == 1.0
    assert type(checked("model: {class: cli_samples.Line, lr: 1}").build_task().lr) is float


def test_nested_objects():
    text = """
model:
  class: cli_samples.Line
  backbone:
    class: Sequential
    args:
    - {class: Linear, in_features: 4, out_features: 8}
    - {class: ReLU}
    - {class: torch.nn.Linear, in_features: 8, out_features: 2, bias: false}
"""
    net = checked(text).build_task().net
    assert [type(part) for part in net] == [nn.Linear, nn.ReLU, nn.Linear]
    assert net[2].bias is None


def test_arguments_that_bases_take():
    task = checked("model: {class: cli_samples.Many, hidden: 3, lr: 0.5}").build_task()
    assert task.lr == 0.5
    assert set(signature(cli_samples.Many).arguments) >= {"hidden", "lr", "backbone"}
    assert not signature(cli_samples.Many).open


def test_what_takes_anything_is_given_anything():
    task = checked("model: {class: cli_samples.Open, what: [1], ever: {class: torch.nn.ReLU}}").build_task()
    assert task.given["what"] == [1]
    assert isinstance(task.given["ever"], nn.ReLU)


def test_functions_that_make_a_task():
    assert checked("model: {class: cli_samples.make_line, lr: 2}").build_task().lr == 2.0
    with pytest.raises(ConfigError, match=r"run.yaml:1: model: cli_samples.make_nothing returned None, which"):
        checked("model: cli_samples.make_nothing").build_task()


def test_a_callable_that_makes_an_optimizer():
    task = checked(MANY, "model.optimizer={class: AdamW, lr: 0.5}").build_task()
    made = task.given["optimizer"]
    assert isinstance(made, functools.partial)
    assert made([nn.Parameter(torch.zeros(1))]).defaults["lr"] == 0.5


def test_known_classes_need_no_name():
    found = checked("model: {lr: 0.5}\ndata: {batch_size: 2}", model=cli_samples.Line, data=cli_samples.Points)
    assert type(found.build_task()) is cli_samples.Line
    assert found.build_datamodule().batch_size == 2
    other = checked("model: {class: Bare}", model=cli_samples.Line)
    assert type(other.build_task()) is cli_samples.Bare
    assert type(checked("seed: 1", model=cli_samples.Line).build_task()) is cli_samples.Line
    with pytest.raises(ConfigError, match=r"'cli_samples.Blank' must be a subclass of Line"):
        checked("model: {class: cli_samples.Blank}", model=cli_samples.Line)


def test_the_trainers_objects():
    text = """
trainer:
  logger: {class: CSVLogger, save_dir: logs}
  profiler: {class: SimpleProfiler}
  strategy: {class: DDP, find_unused_parameters: true}
  callbacks: [{class: EarlyStopping, monitor: a}, Timer, {class: GradientAccumulationScheduler, scheduling: {0: 2}}]
model: cli_samples.Line
"""
    flags = checked(text).build_settings()
    assert isinstance(flags, treadle.TrainerSettings)
    assert isinstance(flags.logger, treadle.loggers.CSVLogger)
    assert isinstance(flags.strategy, treadle.strategies.DDP)
    assert [type(one).__name__ for one in flags.callbacks] == [
        "EarlyStopping",
        "Timer",
        "GradientAccumulationScheduler",
    ]
    assert checked("model: cli_samples.Line", "trainer.strategy=fsdp").build_settings().strategy == "fsdp"
    one = checked("model: cli_samples.Line", "trainer.callbacks=Timer").build_settings().callbacks
    assert isinstance(one, treadle.callbacks.Timer)


def test_optimizer_and_scheduler():
    text = """
model: cli_samples.Bare
optimizer: {class: SGD, lr: 0.5}
lr_scheduler:
  class: SequentialLR
  milestones: [3]
  schedulers: [{class: LinearLR, total_iters: 3}, {class: CosineAnnealingLR, T_max: 10}]
  interval: step
  frequency: 2
"""
    task = checked(text).build_task()
    made = task.configure_optimizers()
    assert type(made["optimizer"]) is torch.optim.SGD
    assert [len(group["params"]) for group in made["optimizer"].param_groups] == [2]
    config = made["lr_scheduler"]
    assert (config["interval"], config["frequency"]) == ("step", 2)
    assert [type(one).__name__ for one in config["scheduler"]._schedulers] == ["LinearLR", "CosineAnnealingLR"]


def test_frozen_parameters_are_not_trained():
    task = checked("model: cli_samples.Line\noptimizer: AdamW").build_task()
    task.net.bias.requires_grad = False
    assert len(task.configure_optimizers().param_groups[0]["params"]) == 1


def test_errors_while_building_name_the_place():
    with pytest.raises(ConfigError, match=r"run.yaml:1: optimizer: AdamW: Invalid learning rate: -1"):
        checked("optimizer: {class: AdamW, lr: -1}\nmodel: cli_samples.Line").build_task().configure_optimizers()
    with pytest.raises(RuntimeError, match="no such rate") as raised:  # the user's own error, with its traceback
        checked("\nmodel: {class: cli_samples.Picky, lr: -1}").build_task()
    assert raised.value.__notes__ == ["while building model: cli_samples.Picky, run.yaml:2"]


def test_nothing_is_built_to_check(monkeypatch):
    def refuse(self, *args, **kwargs):
        raise AssertionError("built")

    monkeypatch.setattr(cli_samples.Head, "__post_init__", refuse, raising=False)
    checked(MANY, "model.head={width: 3}")


@pytest.mark.parametrize(
    "text",
    [
        "model: cli_samples.Line",
        MANY
        + "optimizer: {class: AdamW, betas: [0.8, 0.9]}\nlr_scheduler: {class: StepLR, step_size: 3, interval: step}",
        "trainer: {callbacks: [{class: EarlyStopping, monitor: 'yes'}, Timer, {class: ModelCheckpoint, mode: max}]}\n"
        "model: {class: cli_samples.Line, backbone: {class: Sequential, args: [{class: Identity}]}}\n"
        "data: cli_samples.Points\n",
        "model: {class: cli_samples.Open, a: [], b: {}, c: '3', d: .inf, e: \"\\u0085\\x07\\u2028\",\n"
        "  f: '${vars.x}', g: [[1], [{}]]}\n"
        "vars: {x: 'a: b # c'}\n",
        'model: {class: cli_samples.Open, a: "\\\\${not one}", b: "no", c: "~", d: "1e3",'
        ' e: " x ", f: "- x", g: {3: 4}}\n',
    ],
)
def test_what_is_printed_reads_back(text):
    first = checked(text)
    printed = dump_yaml(first.resolve_defaults(), first.config.secrets)
    again = checked(printed)

    def data(value):
        if isinstance(value.data, dict):
            return {key: data(item) for key, item in value.data.items() if not isinstance(item.data, Opaque)}
        return [data(item) for item in value.data] if isinstance(value.data, list) else value.data

    assert data(again.resolve_defaults()) == data(first.resolve_defaults())


def test_secrets_are_printed_as_references(monkeypatch):
    monkeypatch.setenv("TREADLE_TOKEN", "hush-hush")
    text = "vars: {t: '${oc.env:TREADLE_TOKEN}'}\nmodel: {class: cli_samples.Many, hidden: 1, name: 'x-${vars.t}'}\n"
    found = checked(text)
    assert found.build_task().given["name"] == "x-hush-hush"
    printed = dump_yaml(found.resolve_defaults(), found.config.secrets)
    assert "hush" not in printed
    assert checked(printed).build_task().given["name"] == "x-hush-hush"


def test_secret_numbers_are_printed_as_references(monkeypatch):
    monkeypatch.setenv("TREADLE_PIN_KEY", "987654")
    found = checked(
        MANY + "vars: {k: '${oc.env:TREADLE_PIN_KEY}'}\n", "model.hidden=${vars.k}", "model.widths=['${vars.k}']"
    )
    assert (found.build_task().given["hidden"], found.build_task().given["widths"]) == (987654, [987654])
    printed = dump_yaml(found.resolve_defaults(), found.config.secrets)
    assert "987654" not in printed
    assert checked(printed).build_task().given["widths"] == [987654]


def test_any_text_reads_back(monkeypatch):
    """Also where secrets stand beside backslashes, quotes, and what looks like a reference."""
    secrets = {"TREADLE_A_KEY": "se${x}\\", "TREADLE_B_TOKEN": "env", "TREADLE_C_SECRET": 'it\'s "so"\n'}
    for name, secret in secrets.items():
        monkeypatch.setenv(name, secret)
    hidden = {secret: f"${{oc.env:{name}}}" for name, secret in secrets.items()}
    parts = [*secrets.values(), "${", "\\", "$", "{", "}", "a", " ", ":", "#", "'", '"', "\n", "~", "[", "-", "\u2028"]
    random = Random(0)
    for _ in range(500):
        key, text = ("".join(random.choices(parts, k=random.randrange(6))) for _ in range(2))
        data = {"vars": {key: text, "list": [text, {"x": text}]}}
        printed = dump_yaml(make_value(data, "here"), hidden)
        assert load([], earlier=("f", printed)).to_plain() == data, printed


def test_rarer_kinds_of_arguments():
    def given(override):
        return (
            checked("model: {class: cli_samples.Odd}", f"model.{override}")
            .build_task()
            .given[override.partition("=")[0]]
        )

    assert given("word={text: a}") == {"text": "a"}
    assert vars(given("wide={factor: 3, bias: false}")) == {"width": 9, "bias": False}
    assert given("placed={first: 1}").given == (1, 2)
    assert given("placed={first: 1, rest: [3, 4]}").given == (1, 2, 3, 4)
    assert given("by_color={RED: 1}") == {cli_samples.Color.RED: 1}
    assert given("by_path={a/b: 1}") == {Path("a/b"): 1}
    found = checked("model: {class: cli_samples.Odd, by_color: {RED: 1}, wide: {bias: false}}")
    again = checked(dump_yaml(found.resolve_defaults()))  # without the width, which would be given twice
    assert vars(again.build_task().given["wide"]) == {"width": 6, "bias": False}
    assert again.build_task().given["by_color"] == {cli_samples.Color.RED: 1}


def test_each_line_says_where_it_is_from():
    text = dump_yaml(checked(MANY, "model.mode=max").resolve_defaults())
    lines = {
        line.partition(":")[0].strip(): line.partition("  #")[2].strip() for line in text.splitlines() if ":" in line
    }
    assert lines["hidden"] == "run.yaml:1"
    assert lines["mode"] == "command line"
    assert lines["widths"] == lines["seed"] == "default"
    assert "# activation: " in text
    assert re.search(r"# layer: torch.nn.modules.linear.Linear +# default", text)


def test_settings_are_the_trainers_flags():
    """The same names, in the same order, with the same types and defaults."""
    own = inspect.signature(treadle.Trainer.__init__).parameters
    flags = {
        name: (one.annotation.replace("Iterable[", "list["), one.default)  # a file holds lists
        for name, one in own.items()
        if one.kind is one.KEYWORD_ONLY
    }
    fields = dataclasses.fields(settings.TrainerSettings)
    assert {field.name: (field.type, field.default) for field in fields} == flags
    assert [field.name for field in fields] == list(flags)
    assert all(field.kw_only for field in fields)


def test_settings_are_for_tools_that_read_dataclasses():
    """Their types resolve, and nobody waits for torch."""
    source = (
        "import sys, typing\nfrom treadle.trainer.settings import TrainerSettings as S\n"
        "print(typing.get_type_hints(S)['limit_val_batches'], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.stdout == "int | float | None False\n", done.stderr


def test_settings_make_a_trainer():
    flags = treadle.TrainerSettings(max_epochs=3, logger=False, accelerator="cpu").flags()
    assert treadle.Trainer(**flags).max_epochs == 3
    with pytest.raises(TypeError, match="max_epoch"):
        treadle.TrainerSettings(max_epoch=3)


def test_words_of_docstrings():
    words = described(cli_samples.Line)
    assert words["backbone"] == "what maps four numbers to two; a linear layer by default."
    assert described(torch.nn.Linear)["in_features"] == "size of each input sample"
    assert "learning rate" in described(torch.optim.AdamW)["lr"]
    assert (
        described(treadle.Trainer)["limit_val_batches"]
        == "Maximum number (int) or fraction (float) of batches of each validation dataloader. Default: all batches."
    )
