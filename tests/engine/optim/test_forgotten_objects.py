"""Loops that forget to prepare something, or to enter `accumulate`, and loops that only look like them."""

import warnings

import pytest
import torch
from support.processes import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import treadle


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def data():
    return DataLoader(torch.randn(32, 2, generator=torch.Generator().manual_seed(1)), 2)


def train(accelerator, model, optimizer, loader, enters=True, loss=None, clip=False):
    for x in loader:
        if enters:
            accelerator.accumulate(model)
        accelerator.backward(model(x).pow(2).mean() if loss is None else loss(x))
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def start(k=1, **options):
    model = build()
    accelerator = treadle.Accelerator(cpu=True, gradient_accumulation_steps=k, **options)
    return accelerator, model, torch.optim.SGD(model.parameters(), lr=0.01)


def train_prepared(*names, k=1, **options):
    """A loop for which only what is named was prepared."""
    accelerator, model, optimizer = start(k)
    parts = {"model": model, "optimizer": optimizer, "loader": data()}
    parts |= {name: accelerator.prepare(parts[name]) for name in names}
    train(accelerator, **parts, **options)
    return accelerator


# -- what is forgotten -----------------------------------------------------------------------------------------------


def train_with_a_head(prepare_head):
    accelerator, model, optimizer = start()
    head = nn.Linear(1, 1)
    optimizer.add_param_group({"params": head.parameters()})
    if prepare_head:
        head = accelerator.prepare(head)
    model, optimizer, loader = accelerator.prepare(model, optimizer, data())
    train(accelerator, model, optimizer, loader, False, lambda x: head(model(x)).mean())


def the_second_model():
    train_with_a_head(prepare_head=False)


def the_optimizer():
    assert train_prepared("model", "loader").steps == 0


def the_optimizer_at_the_end_of_groups():
    accelerator, model, optimizer = start(k=4)
    model, loader = accelerator.prepare(model, data())
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).pow(2).mean())
            if accelerator.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()


def the_context_of_two_models():
    accelerator, model, optimizer = start(k=4)
    other = build()
    models = accelerator.prepare(model, other)
    optimizers = accelerator.prepare(optimizer, torch.optim.SGD(other.parameters(), lr=0.01))
    for x in accelerator.prepare(data()):
        for one, its_optimizer in zip(models, optimizers, strict=True):
            accelerator.backward(one(x).mean())
            its_optimizer.step()
            its_optimizer.zero_grad()


ALL = ("model", "optimizer", "loader")
NOT_PREPARED = "accumulate got a Sequential, which is not prepared"
NOT_AVERAGED = "backward computed gradients of 4 parameters"
NOT_COUNTED = "SGD trains a prepared model, but is not prepared, so its steps are not counted"
NOT_WHOLE = "it steps inside an accumulation group"
NOT_ENTERED = "gradient_accumulation_steps=4, but the loop does not enter accumulate"
FORGOTTEN = {  # the message, whether several ranks would diverge, and the loop
    "nothing prepared": (NOT_PREPARED, True, train_prepared),
    "nothing prepared nor entered": (NOT_AVERAGED, True, lambda: train_prepared(enters=False, clip=True)),
    "only the loader": (NOT_PREPARED, True, lambda: train_prepared("loader", k=2)),
    "the model": (NOT_AVERAGED, True, lambda: train_prepared("optimizer", "loader", enters=False)),
    "the optimizer": (NOT_COUNTED, False, the_optimizer),
    "the optimizer at the end of groups": (NOT_COUNTED, False, the_optimizer_at_the_end_of_groups),
    "the optimizer, with accumulation": (NOT_WHOLE, True, lambda: train_prepared("model", "loader", k=4)),
    "the context": (NOT_ENTERED, False, lambda: train_prepared(*ALL, k=4, enters=False)),
    "the context of two models": (NOT_ENTERED, False, the_context_of_two_models),
}


def outcome(loop):
    """Return the texts of the warnings, and of the error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            loop()
        except ValueError as error:
            return [str(w.message) for w in caught], str(error)
    return [str(w.message) for w in caught], None


# -- what is not -----------------------------------------------------------------------------------------------------


def loss_module_of_its_own():
    train_with_a_head(prepare_head=True)


def teacher_and_average():
    accelerator, model, optimizer = start()
    teacher, average = build().requires_grad_(False), torch.optim.swa_utils.AveragedModel(model)
    probe = nn.Linear(2, 1)
    probe_optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, data())

    def loss(x):
        probe(x).mean().backward()  # each rank's own
        probe_optimizer.step()
        average.update_parameters(accelerator.unwrap_model(model))
        return (model(x) - teacher(x)).pow(2).mean()

    train(accelerator, model, optimizer, loader, loss=loss)


def evaluation_only():
    accelerator, model, _ = start(k=4)
    model, loader = accelerator.prepare(model, data())
    with torch.no_grad():
        for x in loader:
            accelerator.gather_for_metrics(accelerator.unwrap_model(model)(x))


def torchs_own_ddp():
    accelerator, model, optimizer = start()
    if accelerator.num_processes > 1:
        model = DistributedDataParallel(model)
        train(accelerator, model, optimizer, accelerator.prepare(data()))


def accumulate_in_a_later_phase():
    accelerator, model, optimizer = start(k=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, data())
    for number, x in enumerate(loader):  # accumulation by hand
        accelerator.backward(model(x).mean())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    train(accelerator, model, optimizer, loader)


def frozen_and_recomputed():
    accelerator, model, optimizer = start()
    model[0].requires_grad_(False)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, data())
    compute = lambda x: checkpoint(wrapped, x.requires_grad_(), use_reentrant=True).mean()  # noqa: E731
    train(accelerator, wrapped, optimizer, loader, loss=compute)


def an_input_is_optimized():
    accelerator, model, _ = start()
    model = accelerator.prepare(model.requires_grad_(False))
    picture = torch.zeros(1, 2, requires_grad=True)
    optimizer = accelerator.prepare(torch.optim.Adam([picture]))
    for _ in range(4):
        accelerator.backward(model(picture).mean())
        optimizer.step()


class Around(torch.optim.Optimizer):
    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.step = inner.step


def optimizer_around_an_optimizer():
    accelerator, model, optimizer = start()
    model, optimizer, loader = accelerator.prepare(model, Around(optimizer), data())
    train(accelerator, model, optimizer, loader)


def steps_in_hooks():
    """The gradients are used and removed within the backward pass."""
    accelerator, model, _ = start()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    if accelerator.num_processes == 1:
        model = accelerator.prepare(model)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        accelerator.prepare(*optimizers.values())
        for x in accelerator.prepare(data()):
            accelerator.backward(model(x).mean())


def nothing_trained_by_the_accelerator():
    accelerator, model, optimizer = start(k=2)
    for x in data():
        model(x).mean().backward()
        optimizer.step()
    accelerator.gather(torch.ones(1))


RIGHT = [
    *(loss_module_of_its_own, teacher_and_average, evaluation_only, torchs_own_ddp, accumulate_in_a_later_phase),
    *(frozen_and_recomputed, an_input_is_optimized, optimizer_around_an_optimizer, steps_in_hooks),
    nothing_trained_by_the_accelerator,
]


def outcomes():
    forgotten = {name: outcome(loop) for name, (_, _, loop) in FORGOTTEN.items()}
    return forgotten | {loop.__name__: outcome(loop) for loop in (the_second_model, *RIGHT)}


@pytest.fixture(scope="module")
def found():
    return {1: [outcomes()], 2: run(outcomes, 2)}


@pytest.mark.parametrize("loop", FORGOTTEN)
def test_one_process_warns_once(found, loop):
    (by_loop,) = found[1]
    texts, error = by_loop[loop]
    assert error is None
    assert sum(FORGOTTEN[loop][0] in text for text in texts) == 1


@pytest.mark.guarantee
@pytest.mark.parametrize("loop", FORGOTTEN)
def test_two_processes_never_diverge(found, loop):
    message, diverges, _ = FORGOTTEN[loop]
    for rank, by_loop in enumerate(found[2]):
        texts, error = by_loop[loop]
        if diverges:
            assert message in error
        else:
            assert error is None
            assert sum(message in text for text in texts) == (rank == 0)


def test_a_module_that_is_prepared_in_part(found):
    assert found[1][0]["the_second_model"] == ([], None)  # nothing is wrong with one process
    for by_loop in found[2]:
        assert "gradients of 2 parameters (shapes (1, 1), (1,))" in by_loop["the_second_model"][1]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("loop", RIGHT, ids=lambda loop: loop.__name__)
def test_loops_that_forget_nothing(found, world, loop):
    for by_loop in found[world]:
        texts, error = by_loop[loop.__name__]
        assert error is None
        assert not [text for text in texts if "prepare" in text or "accumulate" in text]


def test_a_checkpoint_of_nothing(tmp_path, recwarn):
    accelerator, _, _ = start()
    accelerator.save_state(tmp_path / "c")
    assert ["save_state saves no model" in str(w.message) for w in recwarn] == [True]


def test_the_check_ends():
    assert not train_prepared(*ALL).loop_check.active


@pytest.mark.parametrize("done", [3, 12])
@pytest.mark.parametrize("skips", [True, False])
def test_a_resumed_loop_that_skips_once_more_is_warned(tmp_path, done, skips, recwarn):
    def prepare():
        accelerator, model, optimizer = start()
        return accelerator, *accelerator.prepare(model, optimizer, data())

    accelerator, model, optimizer, loader = prepare()
    for number, x in enumerate(loader, 1):
        accelerator.backward(model(x).mean())
        optimizer.step()
        if number == done:
            accelerator.save_state(tmp_path / "x")
            break
    accelerator, model, optimizer, loader = prepare()
    accelerator.load_state(tmp_path / "x")
    for epoch in range(2):
        for number, x in enumerate(loader):
            if skips and epoch == 0 and number < done:
                continue
            accelerator.backward(model(x).mean())
            optimizer.step()
    found = [str(warning.message) for warning in recwarn if "had no backward pass" in str(warning.message)]
    assert len(found) == skips
