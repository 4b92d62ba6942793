"""Code cells of a notebook are one program, and nothing else in its file changes."""

import json

import pytest
from treadle.tools.migrate.notebooks import migrate_notebook

TEXT = """{"cells": [
  {"cell_type": "markdown", "source": ["import lightning as L"], "metadata": {}},
  { "cell_type": "code", "metadata": {"a": ["x"]}, "outputs": [],
    "source": ["%matplotlib inline\\n", "!pip install lightning \\\\\\n", "   six\\n", "import lightning as L"] },
  {"cell_type": "code", "source": "files = !ls\\nmodel = L.pytorch.Trainer(  # \\u00e9\\n)", "id": "b"},
  {"cell_type": "code", "source": ["%%bash\\n", "import lightning"]},
  {"cell_type": "code", "source": ["x = (1\\n", "% 2)"]},
  {"cell_type": "code", "source": []},
  {"cell_type": "code", "source": [
     "if x:\\n",
     "    from accelerate.utils import set_seed, flux"
   ]}
 ], "nbformat": 4}
"""


def test_cells_are_one_program():
    new, findings = migrate_notebook(TEXT, "n.ipynb")
    wanted = TEXT.replace('"import lightning as L"]', '"import treadle as L"]')
    wanted = wanted.replace('"source": ["import treadle as L"]', '"source": ["import lightning as L"]', 1)
    wanted = wanted.replace("L.pytorch.Trainer", "L.Trainer")
    wanted = wanted.replace(
        '"    from accelerate.utils import set_seed, flux"',
        '"    from treadle.utils import set_seed\\n",\n     "    from accelerate.utils import flux"',
    )
    assert new == wanted
    json.loads(new)
    assert [str(finding) for finding in findings] == [
        "n.ipynb:cell 7:2: accelerate.utils.flux has no counterpart in Treadle."
    ]
    assert migrate_notebook(new, "n.ipynb")[0] == new


def test_an_error_names_the_cell():
    with pytest.raises(SyntaxError, match="cell 5, line 1: "):
        migrate_notebook(TEXT.replace("% 2)", "% 2))"), "n.ipynb")


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
