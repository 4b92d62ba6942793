"""A project of Lightning that is migrated."""

from pathlib import Path

from treadle.__main__ import main

OLD = "import lightning as L\ntrainer = L.pytorch.Trainer()\n"


NEW = "import treadle as L\ntrainer = L.Trainer()\n"


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
