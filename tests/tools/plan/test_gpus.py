"""GPUs are known by their names."""

import pytest
from treadle.tools.plan.gpus import match_driver_name


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA T4", None),
    ],
)
def test_a_gpu_is_known_by_its_drivers_name(name, kind):
    found = match_driver_name(name)
    assert (found and found.name) == kind
