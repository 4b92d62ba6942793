"""Files, overrides and references become one configuration, each of whose values knows where it was written."""

import pytest
from support.configs import made, wrote
from treadle.cli.config.resolve import load

pytestmark = pytest.mark.usefixtures("here")


def test_later_files_win(here):
    first = "trainer: {max_epochs: 1, devices: 2}\nmodel: {class: A, lr: 1.0, sizes: [1, 2, 3]}\n"
    files = wrote(here, a=first, b="trainer: {max_epochs: 5}\nmodel: {sizes: [4]}\nseed: 3\n")
    merged = {"trainer": {"max_epochs": 5, "devices": 2}, "model": {"class": "A", "lr": 1.0, "sizes": [4]}, "seed": 3}
    assert load(files).to_plain() == merged
    assert load(files[::-1]).to_plain()["trainer"]["max_epochs"] == 1


def test_another_class_takes_the_place_of_the_whole(here):
    kept = {"class": "SGD", "momentum": 0.9, "lr": 1}
    for second, expected in (
        ("{class: AdamW, lr: 1}", {"class": "AdamW", "lr": 1}),
        ("{class: SGD, lr: 1}", kept),
        ("{lr: 1}", kept),
        ("null", None),
    ):
        files = wrote(here, a="optimizer: {class: SGD, momentum: 0.9}\n", b=f"optimizer: {second}\n")
        assert load(files).to_plain()["optimizer"] == expected


def test_a_bare_class_takes_arguments_later():
    assert made("optimizer: AdamW", "optimizer.lr=1e-3") == {"optimizer": {"class": "AdamW", "lr": 1e-3}}
    assert made("optimizer: {class: SGD, lr: 1}", "optimizer=AdamW") == {"optimizer": "AdamW"}


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("data.a=3e-4", 3e-4),
        ("data.a=two words, and a: colon", "two words, and a: colon"),
        ("data.a=a=b", "a=b"),
        ("data.a='3'", "3"),
        ('data.a=""', ""),
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
    data = "data: {a: {b: 1, c: 2}, list: [1, 2, 3], n: {0: x, 4: y}}"
    left = {"a": {"c": 2}, "list": [1, 3], "n": {0: "x"}}
    assert made(data, "~data.a.b", "~data.list.1", "~data.n.4")["data"] == left
    assert made("data: {n: {0: x, 4: y}}", "data.n.4=z")["data"] == {"n": {0: "x", 4: "z"}}


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


REFERENCES = {
    "${vars.width}": 4,
    "w${vars.width}-${vars.names.1}": "w4-b",
    "${.key0}": 4,
    "${..vars.width}": 4,
    r"\${vars.width}": "${vars.width}",
    "${oc.env:TREADLE_A}": 7,
    "${oc.env:TREADLE_B}/x": "words/x",
    "${oc.env:TREADLE_NONE,5}": 5,
    "${oc.env:TREADLE_NONE,a,b}": "a,b",
    "${vars.n}": 7,
    "${ vars.box }": {"n": 7},
    "${oc.env:TREADLE_NONE,${vars.n}}": 7,
    "${oc.env:TREADLE_NONE,${oc.env:TREADLE_A,8}}": 7,
    "${oc.env:TREADLE_NONE,/a/${vars.n}}": "/a/7",
}


def test_references(monkeypatch):
    """One that stands alone is what it leads to: types of the environment's values, and text such as 1.10."""
    monkeypatch.setenv("TREADLE_A", "7")
    monkeypatch.setenv("TREADLE_B", "words")
    text = "vars: {width: 3, names: [a, b], n: '${oc.env:TREADLE_A}', box: {n: '${oc.env:TREADLE_A}'}, version: 1.10}\n"
    text += "model:\n" + "".join(f"  key{number}: {reference}\n" for number, reference in enumerate(REFERENCES))
    found = made(text, "vars.width=4")["model"]
    assert dict(zip(REFERENCES, found.values(), strict=True)) == REFERENCES
    version = load([], ["model.v=${vars.version}"], earlier=("f", text)).root.data["model"].data["v"]
    assert (version.text, version.source) == ("1.10", "command line")


@pytest.mark.long
def test_long_chains_of_references():
    links = "".join(f"  a{n}: ${{vars.a{n - 1}}}\n" for n in range(1, 2000))
    assert made(f"vars:\n  a0: 3\n{links}seed: ${{vars.a1999}}\n")["seed"] == 3
