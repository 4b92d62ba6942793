"""`treadle migrate`: what it prints, what it writes, and how it ends."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.migrated import NEW, OLD, migrate, write

pytestmark = pytest.mark.usefixtures("project")


@pytest.mark.long
def test_a_diff_by_default_that_patch_takes(capfd):
    write("src/train.py")
    write("b.py", OLD.replace("\n", "\r\n").rstrip())
    write("latin.py", b"# coding: latin-1\nimport lightning as L  # \xe9\n")
    write("other.py", "import torch\n")
    out = migrate(capfd, ".")
    assert "+++ b/src/train.py\n@@ -1,2 +1,2 @@\n-import lightning as L\n" in out
    assert out.endswith("3 of 4 files would change; --write changes them.\n")
    assert Path("src/train.py").read_text() == OLD
    diff = subprocess.run([sys.executable, "-m", "treadle", "migrate", "."], capture_output=True, check=True).stdout
    subprocess.run(["git", "apply"], input=diff, check=True)
    assert Path("src/train.py").read_text() == NEW
    assert Path("b.py").read_bytes() == NEW.replace("\n", "\r\n").rstrip().encode()
    assert Path("latin.py").read_bytes() == b"# coding: latin-1\nimport treadle as L  # \xe9\n"


def test_write_twice(capfd):
    write("src/train.py")
    write("src/run.yaml", "trainer: {_target_: lightning.pytorch.Trainer}\n")
    assert migrate(capfd, ".", "--write") == "2 of 2 files changed.\n"
    assert Path("src/train.py").read_text() == NEW
    assert Path("src/run.yaml").read_text() == "trainer: {_target_: treadle.Trainer}\n"
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*.*")}
    assert migrate(capfd, ".", "--write") == "0 of 2 files changed.\n"
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*.*")} == before


def test_what_needs_a_hand_is_listed_and_is_status_1(capfd):
    write("a.py", "from accelerate.utils import set_seed, flux\n")
    write("bad.py", "import lightning\nprint 'old'\n")
    write("letters.py", b"import lightning\n# \xff\n")
    out = migrate(capfd, ".", "--write", status=1)
    assert "Needs a manual change:\n  a.py:1: accelerate.utils.flux has no counterpart" in out
    assert "  bad.py:2: does not parse and is unchanged: " in out
    assert "  letters.py: cannot be read and is unchanged: " in out
    assert Path("bad.py").read_text() == "import lightning\nprint 'old'\n"
    assert Path("a.py").read_text() == "from treadle.utils import set_seed\nfrom accelerate.utils import flux\n"
    assert "accelerate.utils.flux" in migrate(capfd, ".", "--write", status=1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "the following arguments are required: path"),
        (["nowhere"], "'nowhere' does not exist. Pass a project folder or a file in it."),
        ([".", "--wrte"], "unrecognized arguments: --wrte"),
    ],
)
def test_wrong_usage_is_status_2(arguments, text, capfd):
    assert text in migrate(capfd, *arguments, status=2)


def test_without_libcst(capfd, monkeypatch):
    from treadle.common import optional

    monkeypatch.setattr(optional, "is_installed", lambda package: package != "libcst")
    assert migrate(capfd, ".", status=2) == (
        "treadle migrate: treadle migrate needs the package 'libcst', which is not installed. Run "
        "pip install 'treadle[migrate]', or pip install libcst.\n"
    )
