"""The base class of callbacks that save."""

from treadle.compat.callbacks import Checkpoint

from treadle import Trainer


def test_a_checkpoint_callback_takes_the_place_of_the_default_one() -> None:
    class Mine(Checkpoint):
        pass

    trainer = Trainer(callbacks=Mine(), logger=False, accelerator="cpu", enable_progress_bar=False)
    assert [type(c) for c in trainer.callbacks if isinstance(c, Checkpoint)] == [Mine]
