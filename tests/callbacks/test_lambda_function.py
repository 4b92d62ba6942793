"""Functions as a callback."""

import pytest
from support.callback_runs import fit
from treadle.callbacks import LambdaCallback


def test_functions_as_a_callback(tmp_path):
    seen = []
    made = LambdaCallback(
        setup=lambda trainer, task, stage: seen.append(stage), on_step_end=lambda t, _: seen.append(t.global_step)
    )
    fit(tmp_path, made, max_epochs=1)
    assert seen == ["fit", 1, 2, 3, 4, 5]
    with pytest.raises(TypeError, match=r"'on_train_epoch_ends' is not a hook. Did you mean 'on_train_epoch_end'"):
        LambdaCallback(on_train_epoch_ends=print)
    with pytest.raises(TypeError, match="must be a function"):
        LambdaCallback(on_fit_end=3)
    assert vars(LambdaCallback(setup=None, on_fit_end=print)) == {"on_fit_end": print}  # Lightning's default is None
