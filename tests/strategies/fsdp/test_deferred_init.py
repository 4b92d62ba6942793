"""Models are built late: without values, and never whole."""

import contextlib
import resource

import pytest
import torch
from support.processes import run
from support.sharded_models import Net, same, whole
from torch import nn
from treadle.strategies.fsdp.deferred_init import Tape

import treadle


def wide_net():
    """In float64, as the trainer asks for."""
    torch.set_default_dtype(torch.float64)
    try:
        return Net()
    finally:
        torch.set_default_dtype(torch.float32)


MADE = {
    "lstm": lambda: nn.LSTM(4, 4, 2, bidirectional=True),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
    "conv": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 2, 2)),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "pad": lambda: nn.Embedding(9, 4, padding_idx=2),
    "by_hand": lambda: nn.ParameterList(
        [torch.tensor([1.0, 2.0]), nn.init.orthogonal_(torch.empty(4, 3)), torch.randn(2)]
    ),
    "sparse": lambda: nn.Linear(6, 6).apply(lambda m: nn.init.sparse_(m.weight, 0.5)),
    "bilinear": lambda: nn.Bilinear(3, 3, 2),
    "net": Net,
    "wide": wide_net,
    # Torch has parts of it for real memory only.
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("name", MADE)
def test_a_model_built_late_is_the_one_built_at_once(name):
    make = MADE[name]
    torch.manual_seed(5)
    wanted, after = make(), torch.rand(3)
    torch.manual_seed(5)
    tape = Tape(torch.device("cpu"))
    with torch.device("meta"), tape.recording():
        built = make()
    assert torch.equal(torch.rand(3), after)  # what is drawn next is as after the real one
    for (key, value), real in zip(built.state_dict().items(), wanted.state_dict().values(), strict=True):
        assert value.is_meta
        assert torch.equal(tape.values(value), real), key


def memory_of_construction(width, blocks):
    accelerator = treadle.Accelerator(cpu=True, strategy="fsdp")
    accelerator.prepare(Net(4, 2))  # what torch imports and sets up
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with accelerator.init_module():
        net = Net(width, blocks)
    built = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    accelerator.prepare(net)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    total = sum(p.nbytes if not hasattr(p, "full_tensor") else p.numel() * p.element_size() for p in net.parameters())
    return [1024 * (point - before) / total for point in (built, after)]


@pytest.mark.exhaustive
def test_a_model_is_never_whole():
    at_once = {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # what is freed goes back to the system
    for built, after in run(memory_of_construction, 2, 1024, 24, env=at_once):  # 400 MB, 24 blocks of 17
        assert built < 0.2
        assert after < 0.5 + 0.2


def test_what_is_done_around_a_model_built_late():
    accelerator = treadle.Accelerator(cpu=True, strategy="fsdp")
    source = nn.Linear(3, 2)
    with accelerator.init_module():
        lost, assigned, copied = (nn.Linear(3, 2) for _ in range(3))
        copied.load_state_dict(source.state_dict())
    with pytest.warns(UserWarning, match="no-op"):
        lost.load_state_dict(source.state_dict())
    with pytest.raises(ValueError, match="written to after it was created without memory"):
        accelerator.prepare(lost)
    assigned.load_state_dict(source.state_dict(), assign=True)
    accelerator.prepare(assigned, copied)
    same(whole(assigned), source.state_dict())
    same(whole(copied), source.state_dict())
    with contextlib.suppress(KeyError), accelerator.init_module():
        raise KeyError
    assert torch.empty(1).device.type == "cpu"
    tape, large = Tape(torch.device("cpu")), torch.ones(1 << 20)
    with torch.device("meta"), tape.recording():
        kept = nn.Parameter(torch.empty(1 << 20))
        kept.data.copy_(large)
    large.zero_()
    with pytest.raises(ValueError, match="the model is initialized was changed before the model was prepared"):
        tape.values(kept)
