"""The parts of pages: charts, colours and text."""

import re

from support.reports import section
from treadle.callbacks.reporting.html import Chart, Page, choose_styles
from treadle.callbacks.reporting.report import judge_times


def test_the_last_label_of_a_chart_is_inside_of_it():
    for last in (2_000, 50_000, 1_000_000, 20_000_000):
        drawn = Chart("loss", {"loss": ([0, last], [1.0, 2.0])}).draw(0)
        x, text = re.findall(r'<text x="([\d.]+)" y="\d+" text-anchor="middle">([\d,]+)</text>', drawn)[-1]
        assert text == f"{last:,}"
        assert float(x) + 3.5 * len(text) <= 560
    for low, high in ((1e-5, 9e-5), (-0.004, 0.001), (1e6, 9e6), (1e9, 9e9), (-1e-9, 1e-9)):
        drawn = Chart("loss", {"loss": ([0, 1], [low, high])}).draw(0)
        for x, text in re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="end">(.*?)</text>', drawn):
            assert float(x) - 7 * len(text) >= -7, text


def test_an_activity_has_one_colour_on_all_pages():
    def colors(times):
        text = Page("x", "finished", times={name: (seconds, 0.0) for name, seconds in times.items()}).render()
        return dict(re.findall(r'background:(#\w+)"></span>(\w+)', section(text, "Where the time went")[0])[::-1])

    names = ("training", "validation", "checkpoints", "setup", "test", "predict")
    first = colors(dict.fromkeys(names, 1.0))
    assert len(first) == len(names)
    assert colors({"checkpoints": 9.0, "setup": 3.0, "training": 1.0}).items() <= first.items()
    assert colors({"setup": 9.0, "checkpoints": 3.0, "training": 1.0}).items() <= first.items()


def test_a_sentence_about_what_took_most_of_the_time():
    assert judge_times({"training": 9.0, "checkpoints": 3.0, "validation": 3.0, "setup": 5.0}, 1.0) == ""
    assert judge_times({}, 0.0) == ""
    assert judge_times({"training": 9.0, "checkpoints": 9.5, "validation": 0.5}, 0.0).startswith(
        "50 % of the time went to checkpoints. ModelCheckpoint(every_n_epochs=...)"
    )
    assert "validation. Trainer(check_val_every_n_epoch" in judge_times({"training": 1.0, "validation": 9.0}, 0.0)
    assert judge_times({"training": 10.0}, 8.0).startswith("80 % of the time went to waiting for training batches.")
    assert judge_times({"training": 1.0, "setup": 30.0}, 0.0) == ""  # imports and first touches of a short run
    assert judge_times({"training": 1.0, "setup": 90.0}, 0.0) == "99 % of the time went to setup."
    text = Page("x", "finished", times={"training": (1.0, 0.0)}, verdict="50 % < it.").render()
    assert "50 % &lt; it." in section(text, "Where the time went")[0]


def test_a_stage_has_one_colour_on_the_whole_page():
    def colors(*names):
        return [re.search(r'stroke="(.*?)"', style)[1] for style in choose_styles(names)]

    train, val = colors("train_loss", "val_loss")
    assert colors("val_acc", "train_acc") == [val, train]
    assert colors("val/f1") == [val]
    assert colors("loss", "val_loss") == [train, val]  # what names no stage is of training
    pale, _, full = choose_styles(["train_loss_step", "val_loss", "train_loss_epoch"])
    assert "opacity" in pale
    assert pale.startswith(full)
    first, second = choose_styles(["val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"])
    assert second == f'{first} stroke-dasharray="6 3"'
    assert len(set(choose_styles([f"x{n}" for n in range(18)]))) == 18
    page = Page("t", "s", times={"setup": (9.0, 0.0), "training": (3.0, 0.0), "validation": (2.0, 0.0)}).render()
    drawn = dict(re.findall(r'background:(#\w+)"></span>(\w+)', page))
    assert (drawn[train], drawn[val]) == ("training", "validation")
