"""Arguments of a class's init, as Lightning finds them."""

import inspect

import pytest

from treadle import LightningModule
from treadle.utilities import parsing


def test_arguments_of_init() -> None:
    class Base(LightningModule):
        def __init__(self, a, *args, b=2, **kwargs):
            super().__init__()
            self.own = parsing.get_init_args(inspect.currentframe())
            parsing.save_hyperparameters(self, ignore="b", frame=inspect.currentframe())

    class Child(Base):
        def __init__(self, c, **kwargs):
            super().__init__(1, x=3)

    child = Child(5, d=6)
    assert child.own == {"a": 1, "b": 2, "x": 3}
    assert dict(child.hparams) == {"a": 1, "x": 3, "c": 5, "d": 6}
    child.rate = 0.1
    assert (parsing.lightning_getattr(child, "rate"), parsing.lightning_getattr(child, "x")) == (0.1, 3)
    parsing.lightning_setattr(child, "x", 4)
    assert child.hparams.x == 4
    assert not parsing.lightning_hasattr(child, "nothing")
    with pytest.raises(AttributeError, match=r"neither the task .* has an attribute or a hyperparameter 'nothing'"):
        parsing.lightning_setattr(child, "nothing", 1)
