"""Lightning's enums."""

from support.trainers import make_trainer
from treadle.compat.utilities.enums import GradClipAlgorithmType


def test_kinds_of_clipping() -> None:
    assert GradClipAlgorithmType.supported_types() == ["value", "norm"]
    assert make_trainer(gradient_clip_algorithm=GradClipAlgorithmType.NORM).gradient_clip_algorithm == "norm"
