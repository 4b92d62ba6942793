"""Each value knows its place; keys with numbers; secrets."""

import pytest
from support.configs import wrote
from treadle.cli.config.resolve import load

pytestmark = pytest.mark.usefixtures("here")


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


def test_secrets_are_noted(monkeypatch):
    monkeypatch.setenv("TREADLE_API_KEY", "hush-hush")
    config = load([], ["data.key=${oc.env:TREADLE_API_KEY}"])
    assert config.to_plain()["data"]["key"] == "hush-hush"
    assert config.secrets == {"hush-hush": "${oc.env:TREADLE_API_KEY}"}
    assert load([], ["data.key=${ oc.env : TREADLE_API_KEY , x}"]).secrets == config.secrets
    monkeypatch.setenv("TREADLE_MAX_TOKENS", "100")
    assert load([], ["data.n=${oc.env:TREADLE_MAX_TOKENS}"]).secrets == {}
