"""Class paths of configurations are translated; requirements and commands are named."""

import pytest
from treadle.tools.migrate.other_files import find_requirements, migrate_text

CONFIGURATION = """\
trainer:
  _target_: lightning.pytorch.Trainer   # as in lightning.pytorch.Trainer
  callbacks: [{class_path: lightning.pytorch.callbacks.EarlyStopping, a: 1}, "pytorch_lightning.callbacks.Timer"]
  logger:
  - class_path: 'lightning.pytorch.loggers.CSVLogger'
  - lightning.pytorch.loggers.TensorBoardLogger
  strategy:
    class_path: lightning.pytorch.strategies.WarpStrategy
# class_path: lightning.pytorch.Trainer
text: see lightning.pytorch.Trainer
name: lightning
file: accelerate.log
folder: ./lightning.pytorch/callbacks
"""


def test_class_paths():
    new, findings = migrate_text(CONFIGURATION, "conf/run.yaml")
    assert new == (
        CONFIGURATION.replace("_target_: lightning.pytorch.Trainer", "_target_: treadle.Trainer")
        .replace("lightning.pytorch.callbacks.EarlyStopping", "treadle.callbacks.EarlyStopping")
        .replace("pytorch_lightning.callbacks.Timer", "treadle.callbacks.Timer")
        .replace("lightning.pytorch.loggers.", "treadle.loggers.")
    )
    (finding,) = findings
    assert str(finding) == "conf/run.yaml:8: lightning.pytorch.strategies.WarpStrategy has no counterpart in Treadle."
    assert migrate_text(new, "conf/run.yaml") == (new, findings)


def test_json():
    old = '{"class_path":"lightning.pytorch.Trainer", "x": ["accelerate.utils.set_seed"]}\r\n'
    assert migrate_text(old, "a.json")[0] == '{"class_path":"treadle.Trainer", "x": ["treadle.utils.set_seed"]}\r\n'


@pytest.mark.parametrize(
    ("name", "line", "package"),
    [
        ("requirements.txt", "lightning>=2.0,<3  # trainer", "lightning"),
        ("requirements-dev.txt", "pytorch-lightning[extra]==1.9.*", "pytorch-lightning"),
        ("requirements.txt", "Lightning ; python_version > '3.9'", "Lightning"),
        ("pyproject.toml", 'dependencies = ["lightning >= 2", "torch"]', "lightning"),
        ("pyproject.toml", '    "accelerate~=1.0",', "accelerate"),
        ("pyproject.toml", 'lightning = "^2.1"', "lightning"),
        ("environment.yml", "  - pytorch-lightning=2.0", "pytorch-lightning"),
        ("setup.cfg", "    lightning_fabric", "lightning_fabric"),
        ("requirements.txt", "lightning-utilities>=0.8", None),
        ("requirements.txt", "# lightning", None),
        ("pyproject.toml", 'dependencies = ["torch", "lightning[extra]>=2"]', "lightning"),
        ("pyproject.toml", 'keywords = ["torch", "lightning"]', None),
        ("pyproject.toml", 'name = "my-lightning-project"', None),
        ("pyproject.toml", "[tool.lightning]", None),
        ("notes.txt", "lightning", None),
    ],
)
def test_requirements_are_named(name, line, package):
    new, findings = migrate_text(f"torch\n{line}\n", name)
    assert new == f"torch\n{line}\n"
    advice = f"{package}: add treadle, and remove {package} unless something else needs it."
    assert [(finding.line, finding.text) for finding in findings] == ([(2, advice)] if package else [])


def test_requirements_of_a_setup_script():
    source = 'setup(name="lightning-thing", install_requires=["torch",\n  "lightning>=2", "accelerate"])\n'
    findings = find_requirements(source, "setup.py")
    told = [(finding.line, finding.text.partition(":")[0]) for finding in findings]
    assert told == [(2, "lightning"), (2, "accelerate")]


def test_requirements_that_have_treadle_are_settled():
    assert migrate_text("treadle\nlightning\n", "requirements.txt")[1] == []
    assert migrate_text('dependencies = [\n  "treadle>=0.1",\n  "lightning"\n]\n', "pyproject.toml")[1] == []


@pytest.mark.parametrize("line", ["accelerate launch --num_processes 2 train.py", "  exec lightning run model a.py"])
def test_commands_are_named(line):
    (finding,) = migrate_text(f"set -e\n{line}\n", "run.sh")[1]
    assert (finding.line, finding.must_change) == (2, True)
    assert finding.text.endswith("use treadle launch instead.")
