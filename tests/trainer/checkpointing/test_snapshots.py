"""What is kept of the last step is a whole step, with the weights that are trained."""

import pytest
import torch
from support.failing_runs import Fails, OtherWeights, Task, loaders, made, saver
from treadle.callbacks import Callback


class Half(torch.optim.SGD):
    """Fails half-way through its third step."""

    taken = 0

    def step(self, closure=None):
        self.taken += 1
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)
        if self.taken == 3:
            raise RuntimeError("planned")
        return super().step(closure)


def test_nothing_is_saved_of_half_a_step(tmp_path):
    task = Task()
    task.configure_optimizers = lambda: Half(task.parameters(), lr=0.01)
    with (
        pytest.warns(UserWarning, match="the run is not saved, because the error occurred after the next optim"),
        pytest.raises(RuntimeError),
    ):
        made(tmp_path, saver(tmp_path)).fit(task, *loaders())
    assert list((tmp_path / "c").iterdir()) == []


def test_weights_that_are_only_for_a_validation_are_not_saved(tmp_path):
    with (
        pytest.warns(UserWarning, match="the run is not saved, because .* the model held other weights"),
        pytest.raises(RuntimeError),
    ):
        made(tmp_path, OtherWeights(), Fails("validation", 2), saver(tmp_path)).fit(Task(), *loaders())
    assert list((tmp_path / "c").iterdir()) == []
    with pytest.raises(RuntimeError):
        made(tmp_path, OtherWeights(), Fails("forward", 3), saver(tmp_path)).fit(Task(), *loaders())
    assert len(list((tmp_path / "c").iterdir())) == 1


class Backup(Callback):
    """Has clones of parameters in its state, as torch_ema does while the model holds the averages."""

    clones = ()

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.clones = [parameter.clone() for parameter in pl_module.parameters()]

    def on_validation_batch_end(self, *_):
        pass

    def state_dict(self):
        return {"clones": list(self.clones)}

    def load_state_dict(self, state_dict):
        self.clones = state_dict["clones"]


def test_clones_of_parameters_in_a_state(tmp_path):
    saving, backup, task = saver(tmp_path), Backup(), Task()
    with pytest.raises(RuntimeError):
        made(tmp_path, saving, backup, Fails("forward", 3)).fit(task, *loaders())
    resumed = Backup()
    made(tmp_path, resumed, max_epochs=0).fit(Task(), *loaders(), ckpt_path=next((tmp_path / "c").iterdir()))
    assert all(map(torch.equal, resumed.clones, task.parameters()))
