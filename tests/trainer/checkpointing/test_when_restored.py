"""When a resumed run restores what: its hooks see which states."""

from support.trainers import make_trainer
from treadle.compat.demos.boring_classes import BoringModel

import treadle


class Counts(treadle.Callback):
    def __init__(self):
        self.count, self.seen = 0, {}

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]

    def on_train_batch_end(self, *args):
        self.count += 1

    def on_fit_start(self, trainer, task):
        self.seen["on_fit_start"] = self.count

    def on_train_start(self, trainer, task):
        self.seen["on_train_start"] = self.count


def test_states_of_callbacks_are_restored_after_on_fit_start(tmp_path):
    def fit(epochs, path=None):
        counts = Counts()
        trainer = make_trainer(max_epochs=epochs, limit_train_batches=3, callbacks=[counts])
        trainer.fit(BoringModel(), ckpt_path=path)
        return trainer, counts

    trainer, _ = fit(1)
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    _, counts = fit(2, tmp_path / "c.ckpt")
    assert counts.seen == {"on_fit_start": 0, "on_train_start": 3}
    assert counts.count == 6
