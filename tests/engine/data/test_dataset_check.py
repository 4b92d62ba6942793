"""The digest of a batch, whatever is in it."""

import torch
from treadle.engine.data.dataset_check import digest


class Labelled(torch.Tensor):
    """Refuses to be another shape, as tensors with names for their columns do."""

    def reshape(self, *shape):
        raise ValueError("the labels would not fit")


def test_a_tensor_subclass_with_methods_of_its_own():
    tensor = torch.arange(6.0).reshape(2, 3)
    labelled = tensor.as_subclass(Labelled)
    assert digest(labelled) == digest((tensor + 0).as_subclass(Labelled))
    assert digest(labelled) != digest((tensor + 1).as_subclass(Labelled))
