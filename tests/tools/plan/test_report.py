"""What a plan says, and what it advises."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from support.planned_models import gpu_of, planner
from treadle.strategies import DDP, FSDP
from treadle.tools.plan import varied
from treadle.tools.plan.report import Schedule, advise, format_duration, format_rounded, format_size, screen
from treadle.tools.plan.simulation import simulate

from treadle.__main__ import main


@pytest.mark.long
def test_what_fits_gets_no_advice_to_shrink():
    again = planner(DDP, 2, 1000)
    assert again().fits
    assert advise(again(), again) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "mib", "words"),
    [
        (DDP, 3.5, ["shard the model (strategy=fsdp)"]),
        pytest.param(FSDP, 2.5, ["activation_checkpointing_policy=True"], marks=pytest.mark.exhaustive),
        (FSDP, 1.5, ["activation_checkpointing_policy=True", "micro-batches of", "accumulated"]),
        pytest.param(FSDP, 0.8, ["no simple change makes it fit"], marks=pytest.mark.exhaustive),
        pytest.param(FSDP, 0.2, ["parameters and optimizer state alone need"], marks=pytest.mark.exhaustive),
    ],
)
def test_the_change_that_makes_it_fit_is_named(strategy, mib, words):
    again = planner(strategy, 4, mib)
    plan = again()
    assert not plan.fits
    (hint,) = advise(plan, again)
    assert all(word in hint for word in words), hint


def test_a_model_without_blocks_gets_other_advice():
    def again(**changes):
        given = {name: changes.pop(name, usual) for name, usual in {"micro_batch": 64, "accumulate": 1}.items()}
        return simulate(
            lambda: torch.nn.Linear(512, 512), lambda samples: torch.zeros(samples, 512),
            lambda model, batch: model(batch).exp().mean(), torch.optim.SGD, world_size=2,
            strategy=varied(FSDP(), **changes), gpu=gpu_of(3.2), precision="32-true", **given,
        )  # fmt: skip

    plan = again()
    assert not plan.fits
    (hint,) = advise(plan, again)
    assert "micro-batches of" in hint
    assert "activation" not in hint


@pytest.mark.long
def test_the_screen_holds_one_page_as_wide_as_the_terminal():
    plan = planner(FSDP, 2048, 1000)()
    text = screen(plan, "decoder", Schedule(steps=124, per_epoch=62, rate="learning rate 1 throughout"), ["a hint"])
    assert len(text.splitlines()) <= 24
    assert max(map(len, text.splitlines())) <= 100
    assert "16,384 samples = 8 per micro-batch x 1 accumulated x 2,048 processes" in text
    assert "124 in all, 62 per epoch" in text
    assert "extrapolation" in text
    low, likely, high = plan.band
    assert low < likely < high
    schedule = Schedule(steps=1, samples=100, per_epoch=1, rate="learning rate 1e-07 at first, then StepLR")
    lines = screen(plan, "decoder", schedule, ["a hint " * 20], gpu_from="assumed", width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert "1 in all, 1 per epoch, which has only 100 samples" in "\n".join(lines)
    assert not any("e+" in line for line in lines)


@pytest.mark.long
def test_the_screen_says_what_bounds_the_step():
    assert "bound by the host" in screen(planner(FSDP, 2, 1000)(), "decoder", Schedule())
    assert "waiting for other processes" in screen(planner(FSDP, 64, 1000, network=1e6)(), "decoder", Schedule())


def test_numbers_in_words():
    sizes = [format_size(n) for n in (0, 1023, 1.5 * 2**30, 2**50, 1023.7 * 1024)]
    assert sizes == ["0 B", "1023 B", "1.5 GiB", "1,024 TiB", "1.0 MiB"]
    durations = [format_duration(s) for s in (2e-5, 0.25, 3, 600, 9000, 1e9)]
    assert durations == ["20 us", "250 ms", "3 s", "10 min", "2.5 h", "11,600 days"]
    # what is rounded up is of the next unit
    assert [format_duration(s) for s in (0.99997e-3, 0.99997, 119.9, 7199)] == ["1 ms", "1 s", "2 min", "2 h"]
    rounded = [format_rounded(n) for n in (0, 0.0123, 1.5, 9867, 191_700, 5.61e6)]
    assert rounded == ["0", "0.0123", "1.5", "9,870", "192,000", "5,610,000"]


def test_the_command(capsys):
    options = ["--model", "gpt-162m", "--length", "64", "--world-size", "16", "--no-advice"]
    assert main(["plan", *options, "--samples", "64,000", "--max-epochs", "1"]) == 0
    out = capsys.readouterr().out
    assert "plan of gpt-162m on 16 x h100 (2 machines), fsdp, bf16-mixed" in out
    assert "4,000 in all" in out


@pytest.mark.slow
def test_the_example_of_the_page(capsys):
    text = (Path(__file__).parents[3] / "docs" / "plan.md").read_text(encoding="utf-8")
    command, said = re.search(r"```console\n\$ treadle (.*?)\n(.*?)```", text, re.DOTALL).groups()
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == said
