"""What is wrong with a configuration is said with file, line and key, what was given, what may be, the nearest name.

Each case: the file, the overrides, and words that the message must hold. Nothing is built.
"""

import os
import re
import sys
import types

import pytest
from support.trainers import says
from treadle.callbacks import Callback
from treadle.cli.commands.command_line import Options, load_config, parse_options
from treadle.cli.config.instantiate.build import check
from treadle.cli.config.resolve import load
from treadle.cli.config.values import ConfigError

MODEL = "model: {class: cli_samples.Line}\n"
ODD = "model: {class: cli_samples.Odd}\n"
MANY = "model: {class: cli_samples.Many, hidden: 3}\n"
TIMER = MODEL + "trainer: {callbacks: [Timer]}\n"
SGD = "model: {class: cli_samples.Line}\noptimizer: SGD\nlr_scheduler: "
LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12))
ECHOES = "vars:\n  a0: [x, x]\n" + "".join(
    f"  a{n}: ['${{vars.a{n - 1}}}', '${{vars.a{n - 1}}}']\n" for n in range(1, 40)
)
DEEP = "vars:\n" + "".join(f"  a{n}: x${{vars.a{n - 1}}}\n" for n in range(200, 0, -1)) + "  a0: 1\n"
DOUBLES = "vars:\n  a0: xx\n" + "".join(f"  a{n}: '${{vars.a{n - 1}}}${{vars.a{n - 1}}}'\n" for n in range(1, 40))

# name: (file, *overrides, words of the message)
CASES = {
    # -- files
    "empty": ("", ["run.yaml: the file is empty", "trainer:"]),
    "a word": ("hello\n", ["run.yaml:1", "contains a single value"]),
    "a tab": ("trainer:\n\tmax_epochs: 1\n", ["run.yaml:2", "a tab", "spaces"]),
    "two documents": (MODEL + "---\n" + MODEL, ["run.yaml:2", "second document"]),
    "unclosed": ("trainer: {max_epochs: 1\nmodel: 1", ["run.yaml:2"]),
    "a colon too many": ("model: a: b\n", ["run.yaml:1", "quote text"]),
    "bad indentation": ("trainer:\n    max_epochs: 1\n  devices: 1\n", ["run.yaml:3", "indentation"]),
    "control characters": ("seed: 1\nmodel: \x07\n", ["run.yaml:2", "#x0007"]),
    "reference in brackets": ("vars: {a: 1}\nseed: [${vars.a}, 1]\n", ["run.yaml:2", "be quoted", "${section.key}"]),
    "text behind a value": ("seed: 1\nmodel: 'a' b\n", ["run.yaml:2", "quote the whole value"]),
    "star": ("model: *.txt\n", ["run.yaml:1", "'*'", "be quoted"]),
    "at": ("model: @x\n", ["run.yaml:1", "'@'", "quote the text"]),
    "no space behind a colon": ("model: {class: A, a:1}\n", ["run.yaml:1", "'a:1'", "a space"]),
    "an alias within itself": ("vars: &v {a: *v}\n", ["run.yaml", "an anchor that contains the alias"]),
    "too deep": ("model: " + "[" * 20_000, ["run.yaml", "nested too deeply"]),
    "too long": ("a: b\n" * 300_000, ["run.yaml", "262,144 bytes"]),
    "a number too long": ("seed: " + "9" * 10_000, ["run.yaml:1", "can't be read as a number"]),
    "key twice": (MODEL + "seed: 0\nseed: 1\n", ["run.yaml:3", "'seed'", "twice", "run.yaml:2"]),
    "key that is no word": ("{trainer: {[1]: 2}}", ["run.yaml:1", "a key must be"]),
    "a tag that runs code": ("seed: !!python/name:os.abort", ["run.yaml:1", "python/name", "is not allowed"]),
    "a tag that builds": ("seed: 0\nmodel: !Task {lr: 1}", ["run.yaml:2", "'!Task'", "is not allowed"]),
    "a tag of bytes": ("seed: !!binary aGk=", ["run.yaml:1", "'!!binary'", "is not allowed"]),
    "a tag that lies": ("seed: !!int three", ["run.yaml:1", "'three'", "'!!int'"]),
    "laughs": (LAUGHS, ["run.yaml:", "more than 100,000 values"]),
    "merges": (MERGES, ["run.yaml:", "more than 100,000 values"]),
    "alias of nothing": ("seed: *zero\n", ["run.yaml:1", "undefined alias", "anchor"]),
    "merge of a list": ("vars: &v [1]\nmodel:\n  <<: *v\n", ["run.yaml:3", "'<<'", "mapping"]),
    "both forms": ("model:\n  class: A\n  class_path: B\n", ["run.yaml:3", "'class'", "'class_path'"]),
    "twice in both forms": ("model: {class_path: A, lr: 1, init_args: {lr: 2}}", ["run.yaml:1", "'lr'", "outside"]),
    # -- references
    "reference to nothing": (MODEL + "seed: ${vars.sed}\nvars: {seed: 1}\n", ["run.yaml:2", "'sed'", "'seed'?"]),
    "a circle": (MODEL + "vars: {a: '${vars.b}', b: '${vars.a}'}\n", ["run.yaml:2", "vars.a -> vars.b -> vars.a"]),
    "what it is in": (MODEL + "vars: {a: {b: '${vars}'}}\n", ["run.yaml:2", "circular"]),
    "no variable": (MODEL + "seed: ${oc.env:TREADLE_NO_SUCH}\n", ["run.yaml:2", "'TREADLE_NO_SUCH'", "default"]),
    "unclosed reference": (MODEL + "seed: ${vars.a\n", ["run.yaml:2", "seed='${vars.a'", "${section.key}"]),
    "unknown resolver": (MODEL + "seed: ${env:HOME}\n", ["run.yaml:2", "env"]),
    "reference in a key": (MODEL + "seed: ${vars.${vars.a}}\nvars: {a: b}\n", ["run.yaml:2", "nested in the key"]),
    "echoes": (MODEL + ECHOES, ["run.yaml:", "expands to more than"]),
    "doubles": (MODEL + DOUBLES, ["run.yaml:", "expands to more than"]),
    "doubles with spaces": (MODEL + DOUBLES.replace("{vars", "{ vars"), ["run.yaml:", "expands to more than"]),
    "doubles behind backslashes": (MODEL + DOUBLES.replace("$", "\\\\$"), ["run.yaml:", "expands to more than"]),
    "doubles of odd keys": (MODEL + re.sub(r"a(\d)", r"a/\1", DOUBLES), ["run.yaml:", "expands to more than"]),
    "a long chain": (MODEL + DEEP, ["run.yaml:", "references are nested too deeply"]),
    "variable of a variable": (MODEL + "seed: ${oc.env:${vars.a}}\n", ["run.yaml:2", "without quotes or references"]),
    "makes a configuration": (MODEL + "seed: ${ oc.create :1}\n", ["run.yaml:2", "'oc.create' is not supported"]),
    "still missing": (MODEL + "seed: ???\n", ["run.yaml:2", "seed", "'???'"]),
    # -- overrides
    "no value": (MODEL, "seed", ["command line: seed", "key.path=value"]),
    "nothing behind": (MODEL, "ckpt_path=", ["ckpt_path=null", "~ckpt_path"]),
    "no key": (MODEL, "=3", ["is not a key"]),
    "below a number": (MODEL + "seed: 0\n", "seed.x=1", ["'seed.x'", "is 0", "run.yaml:2"]),
    "below text": (MODEL, "trainer.strategy=ddp", "trainer.strategy.x=1", ["'trainer.strategy'", "'ddp'"]),
    "list index": (TIMER, "trainer.callbacks.1.x=1", ["has length 1", "run.yaml:2", "+="]),
    "list by a word": (TIMER, "trainer.callbacks.last.x=1", ["'last'", "an index"]),
    "adding nothing": (MODEL, "data.x+=", ["data.x=null", "~data.x to"]),
    "not quite a class": (MODEL, "optimizer=A.", "optimizer.lr=1", ["'optimizer.lr'", "'A.'", "which has no keys"]),
    "adding to no list": (MODEL, "model.lr+=1", "model.lr+=2", "seed=1", "seed+=2", ["'seed+='", "list"]),
    "taking out nothing": (MODEL, "~model.lrr", ["'model.lrr'", "be removed"]),
    "taking out near": (MODEL + "seed: 1\n", "~sed", ["'sed'", "'seed'?"]),
    "unclosed value": (MODEL, "data.x=[1, 2", ["data.x=[1, 2", "flow sequence"]),
    "idle variable": (MODEL + "vars: {width: 1}\nseed: ${vars.width}\n", "vars.widht=2", ["'vars.width'?"]),
    # -- sections and flags
    "unknown section": (MODEL + "trainr: {}\n", ["run.yaml:2", "'trainr'", "'trainer'?", "lr_scheduler"]),
    "lightning's seed": (MODEL + "seed_everything: 1\n", ["run.yaml:2", "'seed'?"]),
    "the model as a task": ("task: {class: cli_samples.Line}\n", ["run.yaml:1", "'task'", "'model'?"]),
    "section of another kind": (MODEL + "trainer: 3\n", ["run.yaml:2", "trainer=3", "mapping"]),
    "unknown flag": (MODEL + "trainer:\n  max_epoch: 3\n", ["run.yaml:3: trainer.max_epoch", "'max_epochs'?"]),
    "flag of old": (MODEL + "trainer: {gpus: 2}\n", ["run.yaml:2: trainer.gpus", "devices"]),
    "flag of another type": (MODEL + "trainer: {max_epochs: three}", ["max_epochs='three'", "an integer or null"]),
    "yes": (MODEL + "trainer: {barebones: yes}\n", ["barebones='yes' must be true or false"]),
    "unknown strategy": (MODEL, "trainer.strategy=dpp", ["command line: trainer.strategy='dpp'", "'ddp'?"]),
    "bad seed": (MODEL + "seed: -1\n", ["run.yaml:2: seed=-1", "2**32"]),
    "run's name": (MODEL + "run: {nam: x}\n", ["run.yaml:2: run.nam", "'name'?"]),
    "no model": ("trainer: {max_epochs: 1}\n", ["no model", "class: my_module.MyTask"]),
    # -- classes
    "class misspelled": ("model: {class: cli_samples.Lin}\n", ["run.yaml:1: model", "cli_samples", "'Lin'", "'Line'?"]),
    "module misspelled": ("model: {class: cli_sampels.Line}\n", ["run.yaml:1: model", "module 'cli_sampels' was not"]),
    "no path": ("model: {class: Lineee}\n", ["run.yaml:1: model", "'Lineee'", "my_package.module"]),
    "no name at all": ("model: {class: 3}\n", ["run.yaml:1: model.class", "3"]),
    "strange path": ("model: {class: 'a b.c'}\n", ["run.yaml:1", "'a b.c'", "import path"]),
    "no class": ("model: {class: cli_samples.TEXT}\n", ["run.yaml:1", "'cli_samples.TEXT'", "str", "not a class"]),
    "another class": ("model: {class: cli_samples.Points}\n", ["run.yaml:1", "TaskModule", "Points"]),
    "unnamed class": ("model: {lr: 1.0}\n", ["run.yaml:1: model names no class"]),
    "callback misspelled": (TIMER, "trainer.callbacks+=EarlyStoping", ["trainer.callbacks.1", "'EarlyStopping'?"]),
    "optimizer misspelled": (MODEL + "optimizer: AdmW\n", ["run.yaml:2: optimizer", "'AdamW'?"]),
    "callback that is none": (TIMER, "trainer.callbacks.0=cli_samples.Points", ["trainer.callbacks.0", "Callback"]),
    "lightning's callback": (
        TIMER,
        "trainer.callbacks.0.class_path=lightningg.pytorch.callbacks.EarlyStopping",
        ["trainer.callbacks.0", "module 'lightningg' was not found", "the short name 'EarlyStopping'"],
    ),
    "another's optimizer": (MODEL + "optimizer: cli_samples.Adam\n", ["Optimizer", "the short name 'Adam'"]),
    # -- arguments
    "unknown argument": (MODEL, "model.lrr=1", ["model.lrr", "Line has no argument 'lrr'", "'lr'?", "lr, backbone"]),
    "unknown through kwargs": (MANY, "model.hiden=1", ["model.hiden", "'hidden'?"]),
    "argument in lightning's form": (
        "model:\n  class_path: cli_samples.Line\n  init_args:\n    lrr: 1\n",
        ["run.yaml:4: model.lrr", "'lr'?"],
    ),
    "missing argument": ("model: {class: cli_samples.Many}\n", ["run.yaml:1: model", "Many needs 'hidden' (int)"]),
    "unknown in a callback": (TIMER, "trainer.callbacks.0.durration=1", ["trainer.callbacks.0.dur", "'duration'?"]),
    "nested class's argument": (
        "model:\n  class: cli_samples.Line\n  backbone:\n    {class: Linear,\n    in_feature: 4, out_features: 2}",
        ["run.yaml:5: model.backbone.in_feature", "'in_features'?", "needs 'in_features' (int)"],
    ),
    "optimizer's argument": (
        MODEL + "optimizer: {class: AdamW, params: []}",
        ["run.yaml:2: optimizer.params", "Remove"],
    ),
    "scheduler alone": (MODEL + "lr_scheduler: {class: StepLR, step_size: 1}", ["run.yaml:2: lr_sched", "'optimizer'"]),
    "scheduler's interval": (SGD + "{class: StepLR, step_size: 1, interval: x}", ["lr_scheduler.interval='x'", "step"]),
    "plateau without metric": (SGD + "ReduceLROnPlateau", ["run.yaml:3: lr_scheduler", "monitor"]),
    # -- types
    "float": (MODEL, "model.lr=fast", ["command line: model.lr='fast' must be a number"]),
    "float in quotes": (MODEL, "model.lr='1e-3'", ["model.lr='1e-3' must be a number", "quotes"]),
    "int": (MANY, "model.hidden=3.0", ["model.hidden=3.0 must be an integer", "Write 3."]),
    "an int in other words": (MODEL + "seed: 1e3\n", ["run.yaml:2: seed=1000.0", "an integer or null. Write 1000."]),
    "more than a float": (MODEL, f"model.lr={'9' * 400}", ["model.lr=999", "must be a number"]),
    "in an optional class": (MODEL, "trainer.profiler={class: SimpleProfiler, x: 1}", ["trainer.profiler.x", "has no"]),
    "typed dict": (ODD, "model.word={text: a, cuont: 2}", ["model.word.cuont", "'count'?"]),
    "typed dict's required": (ODD, "model.word={count: 2}", ["model.word: Word needs 'text'"]),
    "typed dict's type": (ODD, "model.word.count=x", ["model.word.count='x' must be an integer"]),
    "key of an enum": (ODD, "model.by_color={GREEN: 1}", ["by_color.GREEN", "'RED' or 'BLUE'"]),
    "key of a literal": (ODD, "model.by_word={c: 1}", ["by_word.c", "'a' or 'b'"]),
    "what a class settles itself": (ODD, "model.wide={width: 1}", ["model.wide.width", "arguments are factor, bias."]),
    "missing by position": (ODD, "model.placed={second: 3}", ["model.placed: Placed needs 'first' (int)"]),
    "bool is no int": (MANY, "model.hidden=true", ["model.hidden=true must be an integer"]),
    "bool": (MANY, "model.flag=1", ["model.flag=1 must be true or false"]),
    "text": (MANY, "model.name=[a]", ["model.name=['a'] must be text"]),
    "literal": (MANY, "model.mode=maximum", ["model.mode='maximum' must be 'min' or 'max'"]),
    "list": (MANY, "model.widths=3", ["model.widths=3 must be a list of int or null"]),
    "item of a list": (MANY, "model.widths=[1, two]", ["model.widths.1='two' must be an integer"]),
    "mapping": (MANY, "model.sizes.a=x", ["model.sizes.a='x' must be an integer"]),
    "key of a mapping": (
        MODEL,
        "trainer.callbacks=[{class: GradientAccumulationScheduler, scheduling: {a: 1}}]",
        ["scheduling.a", "'a' must be an integer"],
    ),
    "pair": (MANY, "model.pair=[1, 2.0, 3]", ["model.pair", "a list of 2 values: int, float"]),
    "path": (MANY, "model.where=3", ["model.where=3 must be a path or null"]),
    "dataclass": (MANY, "model.head.widht=3", ["model.head.widht", "Head has no argument 'widht'", "'width'?"]),
    "enum": (MANY, "model.color=GREEN", ["model.color='GREEN' must be 'RED' or 'BLUE'"]),
    "function": (MANY, "model.activation=torch.rellu", ["model.activation", "'rellu'", "'relu'?"]),
    "class of a kind": (MANY, "model.layer=cli_samples.Points", ["model.layer", "extends Module"]),
    "number format": (MANY, "model.kind=float33", ["model.kind='float33' must be a dtype"]),
}


def attempt(folder, text, overrides):
    (folder / "run.yaml").write_text(text)
    return check(load(["run.yaml"], overrides))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if name == "too deep" else ()) for name in CASES]
)
def test_is_said(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, *overrides, words = CASES[name]
    with says(ConfigError, *words) as raised:
        attempt(tmp_path, text, overrides)
    assert len(str(raised.value)) < 1200


def test_all_problems_are_said_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "trainer: {max_epoch: 1, devices: 2.5}\nmodel: {class: cli_samples.Many, mode: mid}\noptimizer: Adan\n"
    with pytest.raises(ConfigError) as raised:
        attempt(tmp_path, text, ["seed=x"])
    found = str(raised.value).splitlines()
    assert [re.match(r"[^:]*(:\d+)?: [\w.]+", line)[0] for line in found] == [
        "run.yaml:1: trainer.max_epoch",
        "run.yaml:1: trainer.devices",
        "run.yaml:2: model.mode",
        "run.yaml:2: model",
        "run.yaml:3: optimizer",
        "command line: seed",
    ]


@pytest.mark.parametrize(
    ("name", "make", "words"),
    [
        ("run.yml", lambda folder: (folder / "run.yaml").touch(), ["run.yml: the file does not exist", "run.yaml"]),
        ("configs/a.yaml", lambda folder: None, ["the file does not exist", "the folder 'configs'"]),
        ("folder.yaml", lambda folder: (folder / "folder.yaml").mkdir(), ["folder.yaml", "this is a folder"]),
        ("bytes.yaml", lambda folder: (folder / "bytes.yaml").write_bytes(b"a: \xff"), ["bytes.yaml", "UTF-8"]),
        ("pipe.yaml", lambda folder: os.mkfifo(folder / "pipe.yaml"), ["pipe.yaml", "not a regular file"]),
        ("x" * 5000, lambda folder: None, ["xxx: can't be read", "too long"]),
    ],
    ids=["misspelled", "folder-missing", "folder", "bytes", "pipe", "long"],
)
def test_files_that_are_none(name, make, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path)
    with says(ConfigError, *words):
        load([name])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--confg", "x"], ["--confg", "--config"]),
        (["--config"], ["--config needs a file"]),
        (["run.yaml"], ["run.yaml", "--config"]),
        (["epochs"], ["epochs", "key.path=value"]),
        (["--trainr.max_epochs=3"], ["--trainr.max_epochs", "--trainer"]),
        (["--model.lr"], ["--model.lr needs a value"]),
    ],
    ids=str,
)
def test_command_lines_that_are_none(arguments, words):
    with says(ConfigError, *words):
        parse_options(arguments)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: (folder / "config.yaml").write_text("- 1\n"), ["config.yaml:1", "contains a list"]),
        (lambda folder: (folder / "config.yaml").write_bytes(b"\xff"), ["config.yaml", "UTF-8"]),
        (lambda folder: (folder / "manifest.json").write_text("{}"), ["--from-run run", "manifest.json is damaged"]),
        (lambda folder: None, ["--from-run run", "has no config.yaml"]),
    ],
)
def test_runs_that_are_none(make, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    make(tmp_path / "run")
    with says(ConfigError, *words):
        load_config(Options(from_run="run"))


@pytest.mark.parametrize("secret", ["hush-hush", "h'u\"s\nh", "hush" * 50], ids=["plain", "escaped", "long"])
@pytest.mark.parametrize(
    "override", ["model.mode=${k}", "model.hidden=x${k}", "trainer.strategy=${k}", "optimizer=${k}"]
)
def test_secrets_are_not_said(override, secret, monkeypatch):
    monkeypatch.setenv("TREADLE_KEY", secret)
    with pytest.raises(ConfigError) as raised:
        check(load([], [override.replace("${k}", "${oc.env:TREADLE_KEY}")], earlier=("run.yaml", MANY)))
    assert "${oc.env:TREADLE_KEY}" in str(raised.value)
    assert not any(piece in str(raised.value) for piece in ("hush", "h'u", "h\\'u"))


def test_a_name_that_two_classes_have(monkeypatch):
    for name in ("treadle_one", "treadle_two"):
        twin = type("Twin", (Callback,), {"__module__": name})
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(Twin=twin, __name__=name))
    given = {"trainer": {"callbacks": ["Twin"]}, "model": "cli_samples.Line"}
    with says(ConfigError, "script: trainer.callbacks.0: 'Twin' is ambiguous: it", "treadle_one.Twin or treadle_two"):
        check(load([], defaults=given))
    check(load([], ["trainer.callbacks.0=treadle_one.Twin"], defaults=given))
