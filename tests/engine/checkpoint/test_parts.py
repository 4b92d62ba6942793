"""Parts of a checkpoint: what is sent to rank zero arrives the same each time."""

import torch
from treadle.engine.checkpoint import parts


def test_tensors_are_unpacked_in_one_order():
    content = parts.TensorFile({"torch": torch.ones(3), "numpy": torch.zeros(5, dtype=torch.uint32)}, {"kind": "rank"})
    packed = parts.pack(content)
    seen = [parts.unpack(packed) for _ in range(50)]  # safetensors alone returned both orders within 50
    assert {tuple(unpacked.tensors) for unpacked in seen} == {("numpy", "torch")}
    assert seen[0].notes == {"kind": "rank"}
    torch.testing.assert_close(seen[0].tensors, content.tensors)
