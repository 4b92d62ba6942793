"""The files of a project: which are looked at, and how they are written."""

import os
import time
from pathlib import Path

import pytest
from support.migrated import NEW, OLD, migrate, write
from treadle.tools.migrate.other_files import is_text

pytestmark = pytest.mark.usefixtures("project")


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


def test_which_files_are_looked_at():
    names = "a.yaml b.yml run.sh Makefile Dockerfile requirements/dev.txt requirements.txt environment.yml setup.cfg"
    assert [name for name in names.split() if not is_text(name)] == ["requirements/dev.txt"]
    assert [name for name in ["README.md", "notes.txt", "data.csv"] if is_text(name)] == []
