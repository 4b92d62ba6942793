"""Accelerate's scalers of gradients."""

from treadle.compat.utils.modeling import get_grad_scaler

from treadle.utils import DistributedType


def test_scalers() -> None:
    assert get_grad_scaler(init_scale=4.0, enabled=False).get_scale() == 1
    assert type(get_grad_scaler(DistributedType.FSDP, enabled=False)).__name__ == "ShardedGradScaler"
