"""The flags of the Trainer as a dataclass."""

import dataclasses
import inspect
import subprocess
import sys

import pytest
from treadle.trainer import settings

import treadle


def test_settings_are_the_trainers_flags():
    """The same names, in the same order, with the same types and defaults."""
    own = inspect.signature(treadle.Trainer.__init__).parameters
    flags = {
        # A file holds lists.
        name: (one.annotation.replace("Iterable[", "list[").replace("strategies.", ""), one.default)
        for name, one in own.items()
        if one.kind is one.KEYWORD_ONLY
    }
    fields = dataclasses.fields(settings.TrainerSettings)
    assert {field.name: (field.type, field.default) for field in fields} == flags
    assert [field.name for field in fields] == list(flags)
    assert all(field.kw_only for field in fields)


def test_settings_are_for_tools_that_read_dataclasses():
    """Their types resolve, and nobody waits for torch."""
    source = (
        "import sys, typing\nfrom treadle.trainer.settings import TrainerSettings as S\n"
        "print(typing.get_type_hints(S)['limit_val_batches'], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.stdout == "int | float | None False\n", done.stderr


def test_settings_make_a_trainer():
    flags = treadle.TrainerSettings(max_epochs=3, logger=False, accelerator="cpu").flags()
    assert treadle.Trainer(**flags).max_epochs == 3
    with pytest.raises(TypeError, match="max_epoch"):
        treadle.TrainerSettings(max_epoch=3)
