"""The counters and the phase of a run, and the forms in which checkpoints hold them."""

import pytest
import torch
from support.models import LoggedLine
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import LambdaCallback
from treadle.trainer.loop.progress import Phase, Progress

import treadle

COUNTERS = {
    "epoch": 2,
    "step": 9,
    "batch": 3,
    "batches": 19,
    "samples": 76,
    "validated": 16,
    "skipped": 1,
    "seconds": 1.5,
    "loaded": 2,
    "val_loaded": 1,
}


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.EPOCH_END])
def test_what_is_saved_is_restored(phase):
    saved, restored = Progress(**COUNTERS, phase=phase), Progress()
    restored.load_state_dict(saved.state_dict())
    assert restored == saved


def test_at_an_epochs_end_the_next_one_is_saved():
    saved, restored = Progress(**COUNTERS, phase=Phase.EPOCH_END), Progress()
    restored.load_state_dict(saved.state_dict())
    assert restored == Progress(**{**COUNTERS, "epoch": 3, "batch": 0})
    assert saved.epoch_is_over


def test_of_a_checkpoint_without_it_nothing_is_taken():
    progress = Progress(**COUNTERS)
    progress.load_state_dict({})
    assert progress == Progress(**COUNTERS)


class Task(LoggedLine):
    def __init__(self):
        super().__init__()
        self.validated = []

    def validation_step(self, batch):
        self.validated.append(self.global_step)


class Rows(treadle.loggers.Logger):
    """Keeps the steps at which it got a loss."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def log_metrics(self, metrics, step=None):
        if "loss" in metrics:
            self.steps.append(step)

    def log_hyperparams(self, params, metrics=None):
        pass


def fit(*callbacks, ckpt_path=None):
    treadle.seed_everything(3)
    task, rows = Task(), Rows()
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = treadle.Trainer(
        accelerator="cpu",
        logger=rows,
        callbacks=list(callbacks),
        max_epochs=2,
        val_check_interval=2,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        **quiet,
    )
    x = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x), batch_size=4, shuffle=True)
    trainer.fit(task, loader, loader, ckpt_path=ckpt_path)
    return task, rows.steps


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("hook", "step", "phase"),
    [
        ("on_train_batch_end", 2, Phase.STEP_TAKEN),
        ("on_validation_start", 2, Phase.ENDING_STEP),
        ("on_validation_end", 2, Phase.ENDING_STEP),
        ("on_step_end", 2, Phase.BETWEEN_STEPS),
        ("on_train_batch_end", 4, Phase.STEP_TAKEN),
        ("on_validation_start", 4, Phase.ENDING_STEP),
        ("on_validation_end", 4, Phase.ENDING_STEP),
        ("on_step_end", 4, Phase.EPOCH_TRAINED),
        ("on_train_epoch_end", 4, Phase.EPOCH_END),
    ],
)
def test_a_run_goes_on_from_each_phase(tmp_path, hook, step, phase):
    phases = []

    def save(trainer, *_):
        if trainer.global_step == step:
            phases.append(trainer.progress.phase)
            trainer.save_checkpoint(tmp_path / "c")

    whole, rows = fit()
    fit(LambdaCallback(**{hook: save}))
    assert phases == [phase]
    task, resumed_rows = fit(ckpt_path=tmp_path / "c")
    assert all(map(torch.equal, task.parameters(), whole.parameters()))
    is_logged, is_validated = hook != "on_train_batch_end", hook not in ("on_train_batch_end", "on_validation_start")
    assert resumed_rows == [row for row in rows if row > step or (row == step and not is_logged)]
    assert task.validated == [at for at in whole.validated if at > step or (at == step and not is_validated)]
