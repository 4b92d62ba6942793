"""Models are built without memory: parameters are empty, whatever they are, and buffers are not."""

import contextlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file
from support.language_model import LanguageModel, empty
from support.processes import script
from torch import nn
from treadle.engine.big_models import init_empty_weights, init_on_device


def test_parameters_are_empty_and_buffers_are_not(plain):
    model = empty()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.layers[1].scale, plain.layers[1].scale)
    assert torch.equal(model.mask, plain.mask)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    with init_empty_weights(include_buffers=True):
        model = LanguageModel()
    assert all(buffer.is_meta for buffer in model.buffers())


class Marked(nn.Parameter):
    pass


def test_what_a_parameter_is_stays():
    with init_empty_weights():
        module, shared = nn.Module(), Marked(torch.ones(3), requires_grad=False)
        shared.note = "kept"
        module.one, module.two, module.lazy = shared, shared, nn.LazyLinear(3)
        module.from_numpy = nn.Parameter(torch.from_numpy(shared.detach().numpy()))
    assert type(module.one) is Marked
    assert module.one is module.two
    assert (module.one.is_meta, module.one.requires_grad, module.one.note) == (True, False, "kept")
    assert nn.parameter.is_lazy(module.lazy.weight)
    array = torch.ones(2).numpy()
    with init_on_device("meta", include_buffers=True):
        module.register_buffer("late", torch.from_numpy(array))
    assert module.late.is_meta
    with init_on_device("cpu"):
        assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_contexts_nest_and_end_whatever_happens():
    with init_empty_weights():
        with init_empty_weights():
            assert nn.Linear(2, 2).weight.is_meta
        assert nn.Linear(2, 2).weight.is_meta
        with init_on_device("cpu"):
            assert not nn.Linear(2, 2).weight.is_meta
        with pytest.raises(ZeroDivisionError):
            with init_empty_weights(include_buffers=True):
                _ = 1 / 0
        assert not nn.BatchNorm1d(2).running_mean.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


def test_threads_do_not_see_each_other():
    def build(inside):
        seen, end = set(), time.monotonic() + 0.5
        while time.monotonic() < end:
            with init_empty_weights() if inside else contextlib.nullcontext():
                seen.add(nn.Linear(3, 3).weight.is_meta)
        return seen

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(build, (True, True, False))) == [{True}, {True}, {False}]
    finally:
        sys.setswitchinterval(before)


PEAKS = """
import gc, sys, torch
from torch import nn
from treadle.engine.big_models import *

def peak():
    with open("/proc/self/status") as file:
        return 1024 * int(next(line.split()[1] for line in file if line.startswith("VmHWM:")))

def load(device):
    with init_empty_weights():
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(6)))
        model.noise = nn.Parameter(torch.randn(2048, 2048))
        model.more = nn.Parameter(torch.randn(2048, 2048))
    peaks.append(peak())
    return load_checkpoint_and_dispatch(model, sys.argv[1], {"": device})

torch.set_num_threads(1)
torch.nn.functional.linear(torch.ones(1, 64), torch.ones(64, 64))
nn.Linear(4, 4, device="meta")
peaks = [peak()]  # after what torch loads at its first product and its first weights on device meta
with torch.no_grad():
    load("disk")(torch.ones(1, 2048))
gc.collect()
assert not any(p.is_meta for p in load("cpu").parameters())
print(*((value - peaks[0]) / (4 * 2048 * 2048) for value in (*peaks[1:], peak())))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_never_holds_a_second_copy(tmp_path):
    torch.manual_seed(0)
    weights = {f"{i}.weight": torch.randn(2048, 2048) / 45 for i in range(6)}
    weights |= {name: torch.zeros(2048, 2048) for name in ("noise", "more")}
    save_file(weights, tmp_path / "model.safetensors")
    at_once = {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # what is freed goes back to the system
    done = script(PEAKS, str(tmp_path), env=at_once, fresh=True)
    assert done.returncode == 0, done.stderr
    built, ran, loaded = map(float, done.stdout.split())
    assert built < 1.5  # one random parameter at a time, of eight
    assert ran < 3.5  # six of eight are run through, one after the other
    assert loaded < 9  # the eight of the model, and less than one more
