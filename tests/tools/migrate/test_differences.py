"""What behaves otherwise is found by names, flags, methods and hooks, where they are a peer's."""

import pytest
from treadle.tools.migrate import differences
from treadle.tools.migrate.python_source import migrate_source

HEAD = "import lightning.pytorch as pl\nfrom lightning.pytorch import Trainer as T\nimport accelerate\n"
TOML = """
[[rows]]
case = "case"
says = "fact"
used = ["Trainer(flag)", 'Timer(interval="epoch")', "LocalSGD", ".lr_find", "def optimizer_step", ".log(sync_dist)"]
must_change = false

[[rows]]
case = "other"
says = "change it"
used = ["__version__"]
must_change = true
"""


@pytest.fixture(autouse=True)
def rows(tmp_path, monkeypatch):
    """Rows of our own in the place of the document's."""
    (tmp_path / "differences.toml").write_text(TOML)
    monkeypatch.setattr(differences, "files", lambda package: tmp_path)
    differences._read_signs.cache_clear()
    yield
    differences._read_signs.cache_clear()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("T(flag=1)", "Trainer(flag=...): case: fact"),
        ("pl.Trainer(x, flag=1).fit(flag=2)", "Trainer(flag=...): case: fact"),
        ("T(other=1); Trainer(flag=1); tl.Trainer(flag=1)", None),
        ("pl.callbacks.Timer(interval='epoch')", "Timer(interval=...): case: fact"),
        ("pl.callbacks.Timer(interval='step'); pl.callbacks.Timer()", None),
        ("with accelerate.LocalSGD(model=1): pass", "LocalSGD: case: fact"),
        ("x.tuner.lr_find(1)", ".lr_find: case: fact"),
        ("x.lr_find; lr_find()", None),
        ("class A(B):\n    def optimizer_step(self): self.log(1)", "def optimizer_step: case: fact"),
        ("def optimizer_step(): x.log(1, sync_dist=True)", ".log(sync_dist=...): case: fact"),
    ],
)
def test_a_use(code, found):
    _, findings = migrate_source(f"{HEAD}{code}\n", "file.py")
    lines = 4 + code.partition(found.partition(":")[0])[0].count("\n") if found else 0
    told = [(finding.line, finding.text, finding.must_change) for finding in findings]
    assert told == ([(lines, found, False)] if found else [])


def test_a_name_is_told_of_once_and_what_needs_a_hand_everywhere():
    code = "accelerate.LocalSGD\naccelerate.LocalSGD\npl.__version__\nfrom accelerate import __version__\n"
    _, findings = migrate_source(HEAD + code, "file.py")
    told = [(finding.line, finding.text.partition(":")[0]) for finding in findings]
    assert told == [(4, "LocalSGD"), (6, "__version__"), (7, "__version__")]


def test_every_sign_of_the_document_can_be_read(monkeypatch):
    monkeypatch.undo()
    differences._read_signs.cache_clear()
    assert sum(map(len, differences._read_signs().values())) > 30
