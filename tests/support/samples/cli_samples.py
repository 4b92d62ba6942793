"""Tasks and data for the tests of configurations; named in them as `cli_samples.Line` and the like."""

from __future__ import annotations

import enum
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Required, TypedDict

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import treadle as tl

if TYPE_CHECKING:
    from nowhere import Unknown

TEXT = "not a class"


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Head:
    """The last layer.

    Attributes:
        width: how wide.
        bias: whether it has one.
    """

    width: int
    bias: bool = True


class Line(tl.TaskModule):
    """Fits a line.

    Args:
        lr: the learning rate.
        backbone: what maps four numbers to two;
            a linear layer by default.
    """

    def __init__(self, lr: float = 1e-2, backbone: nn.Module | None = None) -> None:
        super().__init__()
        self.lr = lr
        self.net = backbone or nn.Linear(4, 2)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Deeper(Line):
    """The same with more numbers."""

    def __init__(self, lr: float = 1e-2, backbone: nn.Module | None = None) -> None:
        super().__init__(lr, backbone or nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))


class Takes(tl.Callback):
    """Takes predictions."""

    def on_predict_batch_end(self, *_: Any) -> None:
        pass


class Interrupts(tl.Callback):
    """Somebody presses Ctrl-C in the third step."""

    def on_train_batch_start(self, trainer: tl.Trainer, pl_module: tl.TaskModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            raise KeyboardInterrupt


class Bare(Line):
    """Has no optimizer of its own."""

    configure_optimizers = tl.TaskModule.configure_optimizers


class Many(Line):
    """Has an argument of each kind."""

    def __init__(
        self,
        hidden: int,
        mode: Literal["min", "max"] = "min",
        widths: list[int] | None = None,
        sizes: dict[str, int] | None = None,
        where: Path | None = None,
        head: Head | None = None,
        color: Color = Color.RED,
        activation: Callable[[Tensor], Tensor] = torch.relu,
        layer: type[nn.Module] = nn.Linear,
        name: str = "many",
        flag: bool = False,
        pair: tuple[int, float] = (1, 2.0),
        kind: torch.dtype = torch.float32,
        amount: int | str = 1,
        wrong_default: int = None,  # type: ignore[assignment]  # noqa: RUF013
        strange: Unknown | None = None,
        optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.SGD,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        own = dict(locals())
        self.given = {name: value for name, value in own.items() if name not in ("self", "kwargs", "__class__")}


class Word(TypedDict, total=False):
    text: Required[str]
    count: int


class Wide(Head):
    """Settles one argument of its base, and hands up the others."""

    def __init__(self, factor: int = 2, **kwargs: Any) -> None:
        super().__init__(3 * factor, **kwargs)


class Placed:
    """Has arguments by position alone, and any number of them."""

    def __init__(self, first: int, /, second: int = 2, *rest: int) -> None:
        self.given = (first, second, *rest)


class Odd(Line):
    """Has arguments of rarer kinds."""

    def __init__(
        self,
        word: Word | None = None,
        wide: Wide | None = None,
        placed: Placed | None = None,
        by_color: dict[Color, int] | None = None,
        by_word: dict[Literal["a", "b"], int] | None = None,
        by_path: dict[Path, int] | None = None,
    ) -> None:
        super().__init__()
        self.given = dict(locals())


class Keeps(Line):
    """Keeps its arguments as hyperparameters."""

    def __init__(self, key: str = "", more: dict[str, int] | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()


class Open(Line):
    """Takes anything."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.given = dict(kwargs)


class Picky(Line):
    def __init__(self, lr: float = 1.0) -> None:
        if lr < 0:
            raise RuntimeError("no such rate")
        super().__init__(lr)


class Adam:
    """Is no optimizer."""


class Blank(tl.TaskModule):
    """Has no arguments."""

    @abstractmethod
    def nothing(self) -> None: ...


class Points(tl.DataModule):
    """Points on a line."""

    def __init__(self, batch_size: int = 8, samples: int = 32) -> None:
        super().__init__()
        self.batch_size, self.samples = batch_size, samples

    def loader(self) -> DataLoader[Any]:
        x = torch.randn(self.samples, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, 2 * x[:, :2]), self.batch_size)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader


def make_line(lr: float = 0.5) -> Line:
    """Makes one."""
    return Line(lr)


def make_nothing() -> None:
    return None


def double(x: Tensor) -> Tensor:
    return x * 2
