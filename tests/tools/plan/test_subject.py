"""What can not be planned is explained."""

import pytest

from treadle.__main__ import main


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "pass either --config run.yaml or --model 7b"),
        (["--model", "6b"], "Did you mean"),
        (["--model", "7b", "--gpu", "h1000"], "Did you mean 'h100'"),
        (["--model", "7b", "--strategy", "fsdpp"], "Did you mean 'fsdp'"),
        (["--model", "7b", "--world-size", "0"], "must be an integer of at least 1"),
        (["--model", "7b", "--worldsize", "4"], "Did you mean '--world-size'?"),
        (["--model", "7b", "--clip", "nan"], "'nan' must be a number above 0"),
        (["--model", "7b", "--strategy", "single", "--world-size", "2"], "is for one process"),
        (["--model", "7b", "--strategy", "ddp", "--world-size", "4", "--replicate", "2"], "Use strategy='fsdp'"),
        (["--model", "7b", "--strategy", "ddp", "--checkpoint-activations"], "Use strategy='fsdp'"),
        (["--model", "7b", "--strategy", "fsdp_cpu_offload"], "cpu_offload"),
        (["--model", "7b", "--world-size", "6", "--replicate", "4"], "must divide"),
        (["--model", "7b", "model.lr=1"], "needs --config"),
        (["--config", "run.yaml", "--length", "1"], "--length applies to --model only"),
    ],
)
def test_what_can_not_be_planned_is_explained(options, words, capsys):
    assert main(["plan", *options]) == 2
    assert words in capsys.readouterr().err
