"""Files, overrides and references become one configuration, each of whose values knows where it was written."""

import math
import subprocess
import sys
import time

import pytest
from support import hostile_files
from treadle.cli.config.resolve import load
from treadle.cli.config.values import ConfigError, to_plain
from treadle.cli.config.yaml_loader import parse, parse_scalar


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def wrote(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return [f"{name}.yaml" for name in files]


def made(text, *overrides):
    return load([], overrides, earlier=("run.yaml", text)).to_plain()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-3", -3),
        ("1_000", 1000),
        ("0x10", 16),
        ("3e-4", 3e-4),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("-.inf", -math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        # Text to YAML 1.2, and not a bool, a base-60 number, a date or an octal one, as YAML 1.1 has it.
        ("no", "no"),
        ("on", "on"),
        ("12:30:00", "12:30:00"),
        ("12:00:00:00", "12:00:00:00"),
        ("2026-11-22", "2026-11-22"),
        ("1.2.3", "1.2.3"),
        ("bf16-mixed", "bf16-mixed"),
        ("0123", 123),
        ("1_", "1_"),
        ("1__0.5", "1__0.5"),
    ],
)
def test_words(text, value):
    assert type(parse_scalar(text)) is type(value)
    assert parse_scalar(text) == value
    assert to_plain(parse(f"a: {text}", "f"))["a"] == value


def test_later_files_win(here):
    files = wrote(
        here,
        a="trainer: {max_epochs: 1, devices: 2}\nmodel: {class: A, lr: 1.0, sizes: [1, 2, 3]}\n",
        b="trainer: {max_epochs: 5}\nmodel: {sizes: [4]}\nseed: 3\n",
    )
    assert load(files).to_plain() == {
        "trainer": {"max_epochs": 5, "devices": 2},
        "model": {"class": "A", "lr": 1.0, "sizes": [4]},
        "seed": 3,
    }
    assert load(files[::-1]).to_plain()["trainer"]["max_epochs"] == 1


def test_each_value_knows_where_it_was_written(here):
    files = wrote(
        here, a="trainer:\n  max_epochs: 1\n  devices: 2\n", b="\ntrainer:\n  max_epochs: 5\nmodel:\n- x\n- y\n"
    )
    config = load(files, ["seed=1", "trainer.callbacks+=Timer"], defaults={"run": {"name": "x"}})
    places = {
        "trainer.max_epochs": "b.yaml:3",
        "trainer.devices": "a.yaml:3",
        "model.1": "b.yaml:6",
        "seed": "command line",
        "trainer.callbacks.0": "command line",
        "run.name": "script",
    }
    assert {key: config.find_source(key) for key in places} == places


def test_another_class_takes_the_place_of_the_whole(here):
    files = wrote(here, a="optimizer: {class: SGD, momentum: 0.9}\n", b="optimizer: {class: AdamW, lr: 1}\n")
    assert load(files).to_plain()["optimizer"] == {"class": "AdamW", "lr": 1}
    (here / "b.yaml").write_text("optimizer: {class: SGD, lr: 1}\n")
    assert load(files).to_plain()["optimizer"] == {"class": "SGD", "momentum": 0.9, "lr": 1}
    (here / "b.yaml").write_text("optimizer: {lr: 1}\n")
    assert load(files).to_plain()["optimizer"] == {"class": "SGD", "momentum": 0.9, "lr": 1}
    (here / "b.yaml").write_text("optimizer: null\n")
    assert load(files).to_plain()["optimizer"] is None


def test_a_bare_class_takes_arguments_later():
    assert made("optimizer: AdamW", "optimizer.lr=1e-3") == {"optimizer": {"class": "AdamW", "lr": 1e-3}}
    assert made("optimizer: {class: SGD, lr: 1}", "optimizer=AdamW") == {"optimizer": "AdamW"}


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("data.a=3", 3),
        ("data.a=3e-4", 3e-4),
        ("data.a=null", None),
        ("data.a=two words, and a: colon", "two words, and a: colon"),
        ("data.a=a=b", "a=b"),
        ("data.a='3'", "3"),
        ('data.a=""', ""),
        ("data.a=[1, {b: c}]", [1, {"b": "c"}]),
        ("data.a={b: [1]}", {"b": [1]}),
        ("data.a.b.c=1", {"b": {"c": 1}}),
        ("data.a+=1", [1]),
        ("data.list.1=x", None),
        ("data.a=# no remark", "# no remark"),
    ],
)
def test_overrides(override, value):
    found = made("data: {list: [1, 2, 3]}", override)["data"]
    assert found.get("a") == value
    assert found["list"] == ([1, "x", 3] if "list" in override else [1, 2, 3])


def test_taking_out():
    text = "data: {a: {b: 1, c: 2}, list: [1, 2, 3], n: {0: x, 4: y}}"
    assert made(text, "~data.a.b", "~data.list.1", "~data.n.4") == {
        "data": {"a": {"c": 2}, "list": [1, 3], "n": {0: "x"}}
    }


def test_numbered_keys():
    assert made("data: {n: {0: x, 4: y}}", "data.n.4=z") == {"data": {"n": {0: "x", 4: "z"}}}


def test_anchors_and_merges():
    text = """
vars: {defaults: &d {lr: 1, momentum: 0.5}, more: &m {lr: 2, decay: 3}}
optimizer: {<<: *d, lr: 9}
lr_scheduler: {<<: [*m, *d]}
seed: *d
"""
    found = made(text)
    assert found["optimizer"] == {"lr": 9, "momentum": 0.5}
    assert found["lr_scheduler"] == {"lr": 2, "decay": 3, "momentum": 0.5}
    assert found["seed"] == {"lr": 1, "momentum": 0.5}


def test_lightnings_form():
    text = """
model:
  class_path: my.Task
  init_args:
    lr: 1
    net: {class_path: torch.nn.Linear, init_args: {in_features: 1}}
trainer: {callbacks: [{class_path: EarlyStopping, init_args: {monitor: a}}, {class_path: Timer}]}
"""
    assert made(text, "model.init_args.lr=2", "model.net.class_path=other.Net") == {
        "model": {"class": "my.Task", "lr": 2, "net": {"class": "other.Net", "in_features": 1}},
        "trainer": {"callbacks": [{"class": "EarlyStopping", "monitor": "a"}, {"class": "Timer"}]},
    }


def test_references(monkeypatch):
    monkeypatch.setenv("TREADLE_A", "7")
    monkeypatch.setenv("TREADLE_B", "words")
    text = r"""
vars: {width: 3, names: [a, b], box: {x: 1}}
model:
  whole: ${vars.box}
  number: ${vars.width}
  text: w${vars.width}-${vars.names.1}
  near: ${.number}
  above: ${..vars.width}
  env: ${oc.env:TREADLE_A}
  env_text: ${oc.env:TREADLE_B}/x
  fallback: ${oc.env:TREADLE_NONE,5}
  itself: \${vars.width}
"""
    found = made(text, "vars.width=4")["model"]
    assert found == {
        "whole": {"x": 1},
        "number": 4,
        "text": "w4-b",
        "near": 4,
        "above": 4,
        "env": 7,
        "env_text": "words/x",
        "fallback": 5,
        "itself": "${vars.width}",
    }


def test_references_keep_what_was_written(monkeypatch):
    """One that stands alone is what it leads to: types of the environment's values, and text such as 1.10."""
    monkeypatch.setenv("TREADLE_A", "7")
    text = """
vars: {n: '${oc.env:TREADLE_A}', box: {n: '${oc.env:TREADLE_A}'}, version: 1.10}
model:
  chain: ${vars.n}
  box: ${ vars.box }
  nested: ${oc.env:TREADLE_NONE,${vars.n}}
  twice: ${oc.env:TREADLE_NONE,${oc.env:TREADLE_A,8}}
  comma: ${oc.env:TREADLE_NONE,a,b}
  composed: ${oc.env:TREADLE_NONE,/a/${vars.n}}
"""
    assert made(text)["model"] == {
        "chain": 7,
        "box": {"n": 7},
        "nested": 7,
        "twice": 7,
        "comma": "a,b",
        "composed": "/a/7",
    }
    version = load([], ["model.v=${vars.version}"], earlier=("f", text)).root.data["model"].data["v"]
    assert (version.text, version.source) == ("1.10", "command line")


def test_long_chains_of_references():
    links = "".join(f"  a{n}: ${{vars.a{n - 1}}}\n" for n in range(1, 2000))
    assert made(f"vars:\n  a0: 3\n{links}seed: ${{vars.a1999}}\n")["seed"] == 3


def test_a_reference_may_be_given_on_the_line():
    assert made("vars: {a: 3}", "seed=${vars.a}")["seed"] == 3


def test_secrets_are_noted(monkeypatch):
    monkeypatch.setenv("TREADLE_API_KEY", "hush-hush")
    config = load([], ["data.key=${oc.env:TREADLE_API_KEY}"])
    assert config.to_plain()["data"]["key"] == "hush-hush"
    assert config.secrets == {"hush-hush": "${oc.env:TREADLE_API_KEY}"}
    assert load([], ["data.key=${ oc.env : TREADLE_API_KEY , x}"]).secrets == config.secrets
    monkeypatch.setenv("TREADLE_MAX_TOKENS", "100")
    assert load([], ["data.n=${oc.env:TREADLE_MAX_TOKENS}"]).secrets == {}


def test_nothing_of_a_text_is_run(here):
    marker = here / "marker"
    for text in (f"a: !!python/object/apply:os.system ['touch {marker}']", f"a: !!python/name:os.system\nb: {marker}"):
        with pytest.raises(ConfigError, match="is not allowed"):
            made(text)
    assert not marker.exists()


def test_hostile_files_do_no_harm(here):
    marker = here / "marker"
    loaded = []
    for name, file in hostile_files.settings(here, str(marker)).items():
        began = time.perf_counter()
        try:
            load([file])
            loaded.append(name)
        except ConfigError as error:
            unnamed = [] if str(error).startswith(str(file)) else [name]
            loaded += unnamed
        assert time.perf_counter() - began < 20, name
    assert not marker.exists()
    assert hostile_files.PAYLOAD not in sys.modules
    assert loaded == []


def test_reading_waits_for_no_torch():
    source = (
        "import sys, treadle.cli.commands.command_line as c; "
        "print(c.format_usage('fit', 'x')[:5], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"
