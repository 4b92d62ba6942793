"""What a plan suggests of strategies."""

import pytest
from support.planned_models import planner
from treadle.strategies import DDP, FSDP
from treadle.tools.plan.report import advise


@pytest.mark.long
def test_hybrid_sharding_is_suggested_where_it_is_faster():
    again = planner(FSDP, 64, 1000, network=1e8)
    hints = advise(again(), again)
    assert any("data_parallel_replicate=16: shards of 4" in hint for hint in hints), hints


@pytest.mark.long
def test_mixed_precision_is_suggested_where_it_is_faster():
    again = planner(DDP, 2, 8000, micro_batch=1024, precision="32-true")
    plan = again()
    (hint,) = advise(plan, again)
    gain = plan.band[1] / again(precision="bf16-mixed").band[1] - 1
    assert 0.5 < gain < 1
    assert hint.startswith(f"mixed precision (precision=bf16-mixed) would be {gain:.0%} faster")
