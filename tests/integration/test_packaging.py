"""What an installed copy must hold: the license, and every folder of the package."""

import tomllib
from pathlib import Path

import pytest
from house import TOP_ROOMS

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
