"""Commands of the tools: listed, completed by a shell, and found by their entry points."""

import importlib

import pytest
from treadle.cli.completion import list_candidates

from treadle.__main__ import main


def test_they_are_listed(capsys):
    assert main(["--help"]) == 0
    described = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  "))
    assert described["doctor"] == "check the machines, libraries and connections of a run, on every rank"
    assert described["migrate"] == "rewrite the imports of a project that uses Lightning, Fabric or Accelerate"
    assert described["plan"] == "show what a run would do and need, without its machines"
    assert described["sweep"] == "run many trials of one configuration, each with different values"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("treadle mig", ["migrate"]),
        ("treadle migrate --w", ["--write"]),
        ("treadle migrate sr", []),
        ("treadle sweep --d", ["--dry-run"]),
        ("treadle sweep --config ", []),
        ("treadle sweep tri", ["trials="]),
        ("treadle sweep --config s.yaml trainer.max_e", ["trainer.max_epochs="]),
        ("treadle plan --world", ["--world-size"]),
        ("treadle doctor --n", ["--nproc-per-node"]),
    ],
)
def test_candidates(line, found):
    assert list_candidates(line) == found


def test_paths_that_documents_promise():
    for module, names in {"decoder": "Decoder sizes_of", "plan": "Plan", "simulation": "simulate"}.items():
        home = importlib.import_module(f"treadle.tools.plan.{module}")
        assert all(hasattr(home, name) for name in names.split())
