"""Code cells of a notebook are one program, and nothing else in a file as notebooks are written changes."""

import json

import pytest
from treadle.tools.migrate.notebooks import migrate_notebook

SOURCES = [
    ["%matplotlib inline\n", "!pip install lightning \\\n", "   six\n", "import lightning as L"],
    "files = !ls\nmodel = L.pytorch.Trainer(  # \u00e9\n)",
    ["%%bash\n", "import lightning"],
    ["x = (1\n", "% 2)"],
    [],
    ["if x:\n", "    from accelerate.utils import set_seed, flux"],
]
MARKDOWN = {"cell_type": "markdown", "source": ["import lightning as L"], "metadata": {}}


def dump(sources, **form):
    cells = [MARKDOWN, *({"cell_type": "code", "metadata": {"a": ["x"]}, "source": source} for source in sources)]
    return json.dumps({"cells": cells, "nbformat": 4}, **form) + "\n"


@pytest.mark.parametrize(
    "form", [{"indent": 1, "ensure_ascii": False}, {"indent": 2}, {}], ids=["jupyter", "colab", "line"]
)
def test_cells_are_one_program(form):
    new, findings = migrate_notebook(dump(SOURCES, **form), "n.ipynb")
    wanted = list(SOURCES)
    wanted[0] = [*SOURCES[0][:3], "import treadle as L"]
    wanted[1] = SOURCES[1].replace("L.pytorch.Trainer", "L.Trainer")
    wanted[5] = ["if x:\n", "    from treadle.utils import set_seed\n", "    from accelerate.utils import flux"]
    assert new == dump(wanted, **form)
    (finding,) = findings
    assert str(finding) == "n.ipynb:cell 7:2: accelerate.utils.flux has no counterpart in Treadle."
    assert migrate_notebook(new, "n.ipynb")[0] == new


def test_an_error_names_the_cell():
    with pytest.raises(SyntaxError, match="cell 5, line 1: "):
        migrate_notebook(dump(SOURCES).replace("% 2)", "% 2))"), "n.ipynb")


@pytest.mark.parametrize("text", ["{", "[]", '{"cells": 3}', '{"cells": {}}', '{"cells": [5]}'])
def test_what_is_no_notebook_is_an_error(text):
    with pytest.raises(ValueError, match=r"not a notebook|property name"):
        migrate_notebook(text, "n.ipynb")


@pytest.mark.parametrize("source", ["3", "[1]", "null", "{}"])
def test_a_source_that_is_no_text_is_an_error(source):
    with pytest.raises(ValueError, match="the source of cell 1 is neither a string nor a list of strings"):
        migrate_notebook(f'{{"cells": [{{"cell_type": "code", "source": {source}}}]}}', "n.ipynb")


def test_a_notebook_without_cells():
    assert migrate_notebook("{}", "n.ipynb") == ("{}", [])
