"""Classes are found by their short names."""

import cli_samples
import pytest
from support.configs import checked
from treadle.cli.config.values import ConfigError


def test_known_classes_need_no_name():
    found = checked("model: {lr: 0.5}\ndata: {batch_size: 2}", model=cli_samples.Line, data=cli_samples.Points)
    assert type(found.build_task()) is cli_samples.Line
    assert found.build_datamodule().batch_size == 2
    other = checked("model: {class: Bare}", model=cli_samples.Line)
    assert type(other.build_task()) is cli_samples.Bare
    assert type(checked("seed: 1", model=cli_samples.Line).build_task()) is cli_samples.Line
    with pytest.raises(ConfigError, match=r"'cli_samples.Blank' must be a subclass of Line"):
        checked("model: {class: cli_samples.Blank}", model=cli_samples.Line)
