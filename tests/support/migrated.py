"""A project of Lightning that is migrated."""

import ast
from pathlib import Path

from treadle.tools.migrate.python_source import migrate_source

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


def migrate_twice(source):
    """The migrated source and what needs a hand, by line; a second migration changes nothing and finds as much."""
    new, findings = migrate_source(source, "file.py")
    ast.parse(new)
    again, findings_again = migrate_source(new, "file.py")
    assert again == new
    must_change = [finding for finding in findings if finding.must_change]
    assert len([finding for finding in findings_again if finding.must_change]) == len(must_change)
    return new, {(finding.line, finding.text) for finding in must_change}
