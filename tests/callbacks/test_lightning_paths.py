"""Every public callback is found at the module path that Lightning 2.6 gives it."""

import importlib
import json
from pathlib import Path

import pytest
import treadle.callbacks

RECORD = json.loads((Path(__file__).parents[2] / ".ci" / "peer_names.json").read_text(encoding="utf-8"))
# By path below `lightning.pytorch`: those of Lightning's public names that Treadle's callbacks export too.
PATHS = {
    path: shared
    for path, names in RECORD["lightning"]["names"].items()
    if path.startswith("callbacks.") and (shared := set(names) & set(treadle.callbacks.__all__))
}


def test_the_record_is_of_all_callbacks():
    assert len(PATHS) >= 24
    assert {"Callback", "ModelCheckpoint", "Timer"} <= set().union(*PATHS.values())


@pytest.mark.parametrize("path", PATHS)
def test_path_of(path):
    module = importlib.import_module(f"treadle.{path}")
    for name in PATHS[path]:
        callback = getattr(module, name)
        assert callback is getattr(treadle.callbacks, name)
        assert callback.__module__.startswith(f"treadle.{path}"), "another file defines it"
