"""A configuration is printed so that it reads back, without its secrets."""

import re
from random import Random

import pytest
from support.configs import MANY, checked
from treadle.cli.commands.yaml_dump import dump_yaml
from treadle.cli.config.instantiate.buildable import Opaque
from treadle.cli.config.resolve import load
from treadle.cli.config.values import make_value


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
    monkeypatch.setenv("TREADLE_PIN_KEY", "987654")
    text = MANY + "vars: {t: '${oc.env:TREADLE_TOKEN}', k: '${oc.env:TREADLE_PIN_KEY}'}\n"
    found = checked(text, "model.name='x-${vars.t}'", "model.hidden=${vars.k}", "model.widths=['${vars.k}']")
    printed = dump_yaml(found.resolve_defaults(), found.config.secrets)
    assert "hush" not in printed
    assert "987654" not in printed
    for given in (found.build_task().given, checked(printed).build_task().given):
        assert (given["name"], given["hidden"], given["widths"]) == ("x-hush-hush", 987654, [987654])


@pytest.mark.long
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


def test_each_line_says_where_it_is_from():
    text = dump_yaml(checked(MANY, "model.mode=max").resolve_defaults())
    places = {"hidden": "run.yaml:1", "mode": "command line", "widths": "default", "seed": "default"}
    for name, place in {**places, "# layer: torch.nn.modules.linear.Linear": "default"}.items():
        assert re.search(rf"{name}.* +# {place}", text), name
    assert "# activation: " in text
