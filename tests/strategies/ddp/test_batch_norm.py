"""BatchNorm over all processes."""

import copy
import itertools

import pytest
import torch
from support.ddp_loops import message
from support.processes import run
from torch import nn
from treadle.strategies import DDP

import treadle

SHARES = {"uneven": (3, 6), "single": (1, 8), "even": (4, 4), "none": (0, 5)}


def normed(shape, **options):
    torch.manual_seed(2)
    norm = nn.BatchNorm1d(3, **options) if len(shape) == 1 else nn.BatchNorm2d(3, **options)
    return nn.Sequential(nn.Identity(), norm, nn.Tanh()).double()


def images(rows, shape):
    return torch.randn(rows, 3, *shape[1:], dtype=torch.float64, generator=torch.Generator().manual_seed(8)) * 3 + 1


def one_norm(model, x, weight):
    x = x.clone().requires_grad_()
    seen = []
    for _ in range(2):
        y = model(x)
        (y * weight).sum().backward()
        seen.append(y.detach())
    state = {name: value.clone() for name, value in getattr(model, "module", model).state_dict().items()}
    model.eval()
    late = model(x).detach() if model[1].track_running_stats else None  # else of this process's batch
    return seen, x.grad, state, [p.grad for p in model.parameters()], late


NORMS = {
    "plain": ((1,), {}),
    "images": ((1, 2, 4), {}),
    "bare": ((1,), {"affine": False}),
    "cumulative": ((1,), {"momentum": None}),
    "untracked": ((1,), {"track_running_stats": False}),
}


def norms():
    found = {}
    for (name, (shape, options)), (share, rows) in itertools.product(NORMS.items(), SHARES.items()):
        accelerator = treadle.Accelerator(cpu=True, strategy=DDP(sync_batchnorm=True))
        net = nn.Sequential(normed(shape, **options), nn.Flatten(), nn.Linear(1, 1))  # a parameter in any case
        names = list(net.state_dict())
        accelerator.prepare(net)
        assert list(net.state_dict()) == names
        copy.deepcopy(net)
        rank = accelerator.process_index
        x = images(sum(rows), shape).split(rows)[rank]
        weight = images(sum(rows), shape).sin().split(rows)[rank]
        found[name, share] = one_norm(net[0], x, weight)
    return found


@pytest.mark.long
def test_batch_norm_over_all_processes():
    first, second = run(norms, 2)
    for (name, share), one in first.items():
        shape, options = NORMS[name]
        x = images(sum(SHARES[share]), shape)
        outputs, to_x, state, to_parameters, late = one_norm(normed(shape, **options), x, x.sin())
        two = second[name, share]
        exact = {"rtol": 1e-10, "atol": 1e-12}
        for i in range(2):
            torch.testing.assert_close(torch.cat([one[0][i], two[0][i]]), outputs[i], **exact)
        torch.testing.assert_close(torch.cat([one[1], two[1]]), to_x, **exact)
        for part in (one, two):
            torch.testing.assert_close(part[2], state, **exact)
        torch.testing.assert_close([a + b for a, b in zip(one[3], two[3], strict=True)], to_parameters, **exact)
        if name != "untracked":
            torch.testing.assert_close(torch.cat([one[4], two[4]]), late, **exact)


class OwnNorm(nn.BatchNorm1d):
    pass


def odd_norms():
    words = []
    for net in (nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 2), OwnNorm(2))):
        strategy = DDP(sync_batchnorm=True)
        words.append(message(treadle.Accelerator(cpu=True, strategy=strategy).prepare, net)[1])
    return words


def test_batch_norms_that_can_not_be_replaced():
    for whole, own in run(odd_norms, 2):
        assert "inside a module" in whole
        assert "layer '1' is an OwnNorm" in own
