"""An error as the record of a run keeps it."""

import html
import re

import pytest
import torch
from support.reports import Data, Task, page_of, section, trainer
from treadle.callbacks.reporting.report import format_user_frames


def test_an_error_is_shown_whole_with_the_users_frames_before_all_others(tmp_path):
    one = trainer(tmp_path)
    with pytest.raises(ValueError, match="first line"):
        one.fit(Task(fails=True), datamodule=Data())
    page = page_of(one)
    shown, folded = section(page, "What ended fit")
    message = re.search(r'<p class="error">(.*?)</p>', shown, re.DOTALL)[1]
    place = "in fit, epoch 0, after optimizer step 3, in batch 3\nthe batch: [Tensor (2, 2) float32]"
    assert html.unescape(message) == "ValueError: first line <b>\nsecond line " + "x" * 300 + "\n" + place
    frames = re.search(r"<pre>(.*?)</pre>", shown, re.DOTALL)[1]
    assert re.findall(r"in (\w+)\n", frames) == ["helper"]  # of the first cause
    assert "KeyError" in folded
    assert "stage.py" in folded
    assert "stage.py" not in shown
    assert page.index("What ended fit") < page.index("Where the time went")
    assert "pre-wrap" in page  # nothing is cut off at the right


def test_the_users_frames_of_an_error_without_a_cause():
    try:
        Task().training_step([torch.ones(1, 3)], 0)
    except RuntimeError as error:
        lines = format_user_frames(error).splitlines()
    assert [line.rpartition(" ")[2] for line in lines if line.startswith("  File")][-2:] == ["training_step", "loss"]
