"""The chunked loss of a linear head is the plain loss, with a fraction of its memory."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import treadle

EPS = {torch.float32: 1e-6, torch.float64: 1e-14}


def make(dtype=torch.float32, rows=700, classes=40, width=16):
    """Inputs of three chunks, of which some targets are ignored, and a head."""
    torch.manual_seed(0)
    hidden, targets = torch.randn(2, rows // 2, width), torch.randint(classes, (2, rows // 2))
    targets[0, :30] = -100
    return hidden.to(dtype).requires_grad_(), nn.Linear(width, classes).to(dtype), targets


def run_plainly(hidden, head, targets, **options):
    logits = head(hidden).flatten(0, 1)
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets.flatten(), **options)


def compute(loss, hidden, head, targets, **options):
    """Return the loss and all gradients, in float64."""
    hidden, head = hidden.detach().requires_grad_(), copy.deepcopy(head)
    value = loss(hidden, head, targets, **options)
    value.backward()
    return [value.detach().double(), *(tensor.grad.double() for tensor in (hidden, *head.parameters()))]


def compute_exactly(hidden, head, targets, **options):
    return compute(run_plainly, hidden.double(), copy.deepcopy(head).double(), targets, **options)


def largest_error(results, expected):
    pairs = zip(results, expected, strict=True)
    return max(float((result - wanted).abs().max() / wanted.abs().max()) for result, wanted in pairs)


@pytest.fixture(params=["torch", "own"])
def way(request, monkeypatch):
    """Both ways to compute it: torch's function, and the one for torch releases without it."""
    if request.param == "own":
        monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
    elif not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        pytest.skip("this torch has no linear_cross_entropy")


OPTIONS = [{}, {"reduction": "sum"}, {"label_smoothing": 0.2}, {"ignore_index": 7}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_loss_and_gradients_are_those_of_the_plain_loss(way, options, dtype):
    hidden, head, targets = make(dtype)
    targets[targets < 0] = options.get("ignore_index", -100)
    results = compute(treadle.chunked_cross_entropy, hidden, head, targets, **options)
    assert largest_error(results, compute_exactly(hidden, head, targets, **options)) < EPS[dtype]


def test_weights_without_bias(way):
    hidden, head, targets = make()
    embedding, linear = nn.Embedding(*head.weight.shape, _weight=head.weight), nn.Linear(*head.weight.shape, bias=False)
    linear.weight = head.weight
    expected = run_plainly(hidden, linear, targets)
    for shared in (embedding, head.weight):
        torch.testing.assert_close(treadle.chunked_cross_entropy(hidden, shared, targets), expected)


def test_only_ignored_targets_are_what_they_are_in_the_plain_loss(way):
    hidden, head, targets = make()
    targets.fill_(-100)
    assert treadle.chunked_cross_entropy(hidden, head, targets).isnan()
    assert treadle.chunked_cross_entropy(hidden, head, targets, reduction="sum") == 0
    for loss in (run_plainly, treadle.chunked_cross_entropy):

        def masked(*inputs, loss=loss):
            return torch.where(torch.tensor(False), loss(*inputs), 0.0)

        assert not any(part.any() for part in compute(masked, hidden, head, targets))  # nor NaN


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "bfloat16"])
def test_bfloat16_is_as_exact_as_the_plain_loss(autocast):
    """torch's function would round the loss itself, and 1 / count, to bfloat16."""
    made = make(torch.float32 if autocast else torch.bfloat16)
    exact = compute_exactly(*made)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        chunked, plain = (compute(loss, *made) for loss in (treadle.chunked_cross_entropy, run_plainly))
    assert chunked[0] == pytest.approx(float(exact[0]), rel=1e-4)
    assert largest_error(chunked, exact) <= 1.5 * largest_error(plain, exact)


def test_float16_keeps_small_gradients():
    """The gradients are computed after the loss was scaled; before, these would be below float16's smallest number."""
    made = make()
    scale = 2.0**14

    def loss(hidden, head, targets):
        with torch.autocast("cpu", torch.float16):
            return treadle.chunked_cross_entropy(hidden * 1e-3, head, targets) * scale

    results = compute(loss, *made)
    hidden, head, targets = made
    expected = compute_exactly((hidden * 1e-3).detach(), head, targets)
    assert largest_error(results[2:], [scale * gradient for gradient in expected[2:]]) < 0.01


def measure_peak(loss):
    """Return the bytes that a loss and its backward pass allocate at most."""
    made = make(rows=2048, classes=4000, width=64)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        compute(loss, *made)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def test_the_peak_is_far_below_that_of_the_logits(way):
    logits = 2048 * 4000 * 4
    assert measure_peak(run_plainly) > 2.5 * logits
    assert measure_peak(treadle.chunked_cross_entropy) < logits / 2


def test_errors():
    hidden, head, targets = make()
    with pytest.raises(ValueError, match=r"hidden has shape \(2, 350, 16\) and targets \(2, 349\), but each vector"):
        treadle.chunked_cross_entropy(hidden, head, targets[:, 1:])
    with pytest.raises(ValueError, match="reduction='none' must be 'mean' or 'sum'"):
        treadle.chunked_cross_entropy(hidden, head, targets, reduction="none")
    with pytest.raises(TypeError, match=r"head=a Sequential must be an nn.Linear, an nn.Embedding or a weight"):
        treadle.chunked_cross_entropy(hidden, nn.Sequential(head), targets)
