"""Commands of the tools: listed, completed by a shell, and found by their entry points."""

import importlib
import re

from treadle.__main__ import main


def test_they_are_listed(capsys):
    assert main(["--help"]) == 0
    described = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  "))
    assert described["doctor"] == "check the machines, libraries and connections of a run, on every rank"
    assert described["migrate"] == "rewrite the imports of a project that uses Lightning, Fabric or Accelerate"
    assert described["plan"] == "show what a run would do and need, without its machines"
    assert described["sweep"] == "run many trials of one configuration, each with different values"


def test_a_shell_completes_their_options(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    for command, words in {
        "migrate": "--write",
        "sweep": "--config --dry-run",
        "plan": "--config --world-size --gpu",
        "doctor": "--nproc-per-node",
    }.items():
        (line,) = re.findall(rf"^_shtab_treadle_{command}_option_strings=\((.*)\)", script, re.MULTILINE)
        assert set(words.split()) <= set(line.replace("'", "").split())
    assert "trainer.max_epochs=" in script
    assert "trials=" in script


def test_paths_that_documents_promise():
    for module, names in {"subject": "Decoder sizes_of", "plan": "Plan", "simulation": "simulate"}.items():
        home = importlib.import_module(f"treadle.tools.plan.{module}")
        assert all(hasattr(home, name) for name in names.split())
