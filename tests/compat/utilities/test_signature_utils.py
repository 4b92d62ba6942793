"""The parameters of a hook."""

from treadle.compat.demos.boring_classes import BoringModel
from treadle.compat.utilities.signature_utils import is_param_in_hook_signature


def test_the_parameters_of_a_hook() -> None:
    assert is_param_in_hook_signature(BoringModel().training_step, "batch")
    assert not is_param_in_hook_signature(BoringModel().training_step, "dataloader_idx")
    assert is_param_in_hook_signature(BoringModel().training_step, "other", min_args=2)
