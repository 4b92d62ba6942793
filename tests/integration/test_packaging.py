"""What an installed copy must hold: the license, every folder of the package, and types for the peers' modules."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.house import TOP_ROOMS
from treadle.common.peer_names import list_paths

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_license_is_the_one_that_is_declared():
    project = SETTINGS["project"]
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert text.split()[:4] == ["Apache", "License", "Version", "2.0,"]
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.mark.parametrize("room", [*TOP_ROOMS, "treadle"])
def test_every_folder_with_code_is_packaged(room):
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / room).rglob("*.py")}
    names = {".".join(folder.parts) for folder in folders}
    wanted = {name if name.split(".")[0] == "treadle" else f"treadle.{name}" for name in names}
    listed = set(SETTINGS["tool"]["setuptools"]["packages"])
    assert wanted <= listed


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder that a wheel is made of."""
    folder = tmp_path_factory.mktemp("build")
    build = [sys.executable, "setup.py", "-q", "build", "--build-base", str(folder), "--build-lib"]
    subprocess.run([*build, str(folder / "lib")], cwd=ROOT, capture_output=True, check=True, timeout=100)
    return folder / "lib"


@pytest.mark.long
def test_an_archive_can_be_imported(built, tmp_path):
    archive = shutil.make_archive(str(tmp_path / "treadle"), "zip", built)
    source = "import treadle\nfrom treadle.compat.callbacks.early_stopping import EarlyStopping\n"
    source += "from treadle.callbacks.reporting import make_chart_script, render_document\n"  # they read files
    source += "print(EarlyStopping, treadle.__file__, 'polyline' in render_document('', [], make_chart_script([])))"
    environment = {**os.environ, "PYTHONPATH": archive}
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    home = os.path.join(archive, "treadle", "__init__.py")
    assert done.stdout == f"<class 'treadle.callbacks.early_stopping.EarlyStopping'> {home} True\n", done.stderr


@pytest.mark.long
def test_type_checkers_find_the_modules_that_have_no_file(built, tmp_path):
    """The wheel has a stub for each, so a project whose imports were replaced stays free of errors."""
    program = "".join(f"import treadle.compat.{path}\n" for path in list_paths() if path)
    program += """
import treadle.compat as pl
from treadle.compat.callbacks.early_stopping import EarlyStopping
from treadle.compat.callbacks.progress.tqdm_progress import Tqdm
from treadle.state import PartialState
from treadle.utils import gather
from treadle.utils.operations import gather as same

class Stopping(EarlyStopping):
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        print(PartialState().device, gather, same, Tqdm())
"""
    program += "from treadle.compat.callbacks.nothing import EarlyStopping as Missing\n"  # has no stub
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--no-site-packages", "--follow-imports", "silent", "--no-incremental"]
    environment = {**os.environ, "MYPYPATH": str(built)}
    done = subprocess.run(
        [*command, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert '"treadle.compat.callbacks.nothing"  [import-not-found]' in done.stdout, done.stdout + done.stderr
    assert "Found 1 error in 1 file" in done.stdout, done.stdout
