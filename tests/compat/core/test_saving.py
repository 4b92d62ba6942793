"""Lightning's files of hyperparameters."""

import pytest
from treadle.compat.core import saving


def test_files_of_hyperparameters(tmp_path) -> None:
    values = {"batch_size": 32, "rate": 0.1, "root": "./x", "deep": {"a": [1, 2]}}
    saving.save_hparams_to_yaml(tmp_path / "h.yaml", values)
    assert saving.load_hparams_from_yaml(tmp_path / "h.yaml") == values
    assert type(saving.load_hparams_from_yaml(tmp_path / "h.yaml", use_omegaconf=False)) is dict
    assert saving.convert("x y") == "x y"
    saving.update_hparams(values, {"deep": {"b": 3}, "new": 1})
    assert values["deep"] == {"a": [1, 2], "b": 3}
    with pytest.raises(RuntimeError, match="does not exist"):
        saving.save_hparams_to_yaml(tmp_path / "no" / "h.yaml", values)
