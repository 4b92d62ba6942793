"""`treadle migrate`: what it prints, what it writes, and how it ends."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from treadle.__main__ import main

OLD = "import lightning as L\ntrainer = L.pytorch.Trainer()\n"
NEW = "import treadle as L\ntrainer = L.Trainer()\n"


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """An empty folder, in which the command is run."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def write(name, content=OLD):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def migrate(capfd, *arguments, status=0):
    """The lines that the command prints."""
    assert main(["migrate", *map(str, arguments)]) == status
    said = capfd.readouterr()
    return said.err if status == 2 else said.out


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
    assert Path("a.py").read_text() == ("from treadle.utils import set_seed\nfrom accelerate.utils import flux\n")
    assert "accelerate.utils.flux" in migrate(capfd, ".", "--write", status=1)


def test_bytes_modes_and_links_stay(capfd, tmp_path):
    script = write("run.py", b"\xef\xbb\xbfimport lightning as L\r\n# \xc3\xa9")
    script.chmod(0o755)
    outside = tmp_path / "outside.py"
    outside.write_text(OLD)
    Path("link.py").symlink_to(outside)
    Path("loop").symlink_to(".")
    assert migrate(capfd, ".", "--write") == "1 of 1 file changed.\n"
    assert script.read_bytes() == b"\xef\xbb\xbfimport treadle as L\r\n# \xc3\xa9"
    assert script.stat().st_mode & 0o7777 == 0o755
    assert outside.read_text() == OLD
    assert sorted(os.listdir()) == ["link.py", "loop", "run.py"]
    assert migrate(capfd, "link.py", "--write") == "1 of 1 file changed.\n"
    assert (Path("link.py").is_symlink(), outside.read_text()) == (True, NEW)


def test_what_is_left_out(capfd):
    for name in (".venv/a.py", ".git/a.py", "node_modules/a.py", "env/a.py", "conda/a.py", "x/__pycache__/a.py"):
        write(name)
    write("lightning_logs/version_0/hparams.yaml", "a: lightning.pytorch.Trainer\n")
    write("data.json", '["lightning.pytorch.Trainer"]' + " " * (1 << 20))
    write("env/pyvenv.cfg", "")
    write("conda/conda-meta/history", "")
    os.mkfifo("pipe.py")
    assert migrate(capfd, ".", "--write") == "0 of 0 files changed.\n"
    assert migrate(capfd, ".venv/a.py").endswith("1 of 1 file would change; --write changes it.\n")


def test_what_cannot_be_read_is_named(capfd, project):
    write("closed/a.py")
    write("secret.py").chmod(0)
    write("open.py")
    Path("closed").chmod(0)
    project.chmod(0o755)
    migrate(capfd, "open.py")  # everything is imported, for the user who may read nothing else
    user = os.geteuid()
    if user == 0:  # who may read everything
        os.seteuid(65534)
    try:
        out = migrate(capfd, ".", status=1)
    finally:
        os.seteuid(user)
        Path("closed").chmod(0o755)
    assert "  closed: cannot be read and is unchanged: Permission denied\n" in out
    assert "  secret.py: cannot be read and is unchanged: Permission denied\n" in out
    assert "+++ b/open.py" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "the following arguments are required: path"),
        (["nowhere"], "'nowhere' does not exist. Pass a project folder or a file in it."),
        (["a", "b"], "unrecognized arguments: b"),
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


@pytest.mark.exhaustive
def test_two_hundred_files(capfd):
    """In seconds of the processor, whatever else the machine does; 1.5 on a machine of two cores."""
    filler = "".join(
        f"def function_{n}(a, b=None):\n    return [a + {n} for a in range(b or 3)]\n\n" for n in range(80)
    )
    for number in range(200):
        write(f"package/module_{number}.py", OLD + "from accelerate.utils import set_seed\n" + filler)
    start = time.process_time()
    assert migrate(capfd, ".", "--write") == "200 of 200 files changed.\n"
    assert time.process_time() - start < 10


def test_help(capfd):
    with pytest.raises(SystemExit) as ended:
        main(["migrate", "--help"])
    assert ended.value.code == 0
    assert "--write" in capfd.readouterr().out
