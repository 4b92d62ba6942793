"""``step_micro_batches``: weights, optimizer states, losses and norms with the same bits on any number of processes."""

import functools
import hashlib
import math
import random

import numpy as np
import pytest
import torch
from support.callback_runs import Rows
from support.differences import whole
from support.models import Stream
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from treadle.engine.checkpoint import OpenCheckpoint

import treadle

V, SIZE, SAMPLES = 8, 3, 61  # steps of 24, 24 and 13 samples: five of the last micro-batches, the fifth with one sample
CLIP = {"mlp": 0.3, "transformer": 1.0}


def build(name):
    torch.manual_seed(3)
    return MLP() if name == "mlp" else Transformer()


def dataset(name):
    generator = torch.Generator().manual_seed(7)
    if name == "mlp":
        return TensorDataset(
            torch.randn(SAMPLES, 11, generator=generator), torch.randint(0, 5, (SAMPLES,), generator=generator)
        )
    return TensorDataset(torch.randint(0, 97, (SAMPLES, 14), generator=generator))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(11, 37), nn.GELU(), nn.LayerNorm(37), nn.Dropout(0.2), nn.Linear(37, 5))

    def forward(self, inputs):
        return self.layers(inputs)

    def loss(self, batch):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class Transformer(nn.Module):
    def __init__(self, width=44):
        super().__init__()
        self.embedding = nn.Embedding(97, width)
        self.position = nn.Parameter(torch.randn(13, width) * 0.1)
        self.attention = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 131), nn.Linear(131, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.scale = nn.Parameter(torch.ones(1))

    def loss(self, batch):
        tokens, targets = batch[0][:, :-1], batch[0][:, 1:]
        x = self.embedding(tokens) + self.position
        q, k, v = self.attention(self.norms[0](x)).unflatten(-1, (4, -1)).transpose(1, 2).chunk(3, -1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        x = x + self.scale * y.transpose(1, 2).flatten(2)
        x = x + self.down(nn.functional.dropout(nn.functional.gelu(self.up(self.norms[1](x))), 0.1))
        return nn.functional.cross_entropy((x @ self.embedding.weight.T).flatten(0, 1), targets.flatten())


class Task(treadle.TaskModule):
    def __init__(self, name):
        super().__init__()
        self.net, self.name = build(name), name
        self.norms, self.seeds = [], []

    def training_step(self, batch, index):
        self.seeds.append(torch.initial_seed())
        loss = self.net.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.norms.append(self.trainer.accelerator.clip_grad_norm_(self.parameters(), CLIP[self.name]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, foreach=True)


def digest(values):
    return hashlib.sha256(
        b"".join(torch.as_tensor(v).contiguous().view(torch.uint8).numpy() for v in values)
    ).hexdigest()[:12]


def describe(model, optimizer, norms, losses, epochs):
    moments = [whole(moment) for state in optimizer.state.values() for moment in state.values() if moment.ndim]
    double = functools.partial(torch.tensor, dtype=torch.float64)
    return {
        "weights": digest(whole(p.detach()).reshape(-1) for p in model.parameters()),
        "moments": digest(moment.reshape(-1) for moment in moments),
        "norms": digest(norm.reshape(1) for norm in norms),
        "losses": digest([double(losses)]),
        "epochs": digest([double(epochs)]),
        "steps": len(norms),
    }


def add_halves(values):
    while len(values) > 1:
        half = len(values) // 2
        pairs = values[:half] + values[half : 2 * half]
        if len(values) % 2:
            pairs[0] += values[-1]
        values = pairs
    return values[0]


def clip(parameters, limit):
    """Clip by a norm that adds squares within rows, and then over rows, in halves."""
    gradients = [p.grad.numpy() for p in parameters]
    rows = [add_halves(np.square(g).reshape(len(g), -1).T) for g in gradients]
    norm = torch.tensor(add_halves(np.concatenate(rows))).sqrt()  # which MKL rounds in another way than NumPy
    torch.testing.assert_close(norm, nn.utils.get_total_norm([p.grad for p in parameters]))
    nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm


def loader(name):
    return DataLoader(dataset(name), batch_size=SIZE, shuffle=True, generator=torch.Generator().manual_seed(5))


def fit(name, precision, epochs, *, ckpt_path=None, save=None, task=None, data=None, **flags):
    task, rows = task or Task(name), Rows()
    treadle.seed_everything(1)
    flags = {"max_epochs": epochs, "log_every_n_steps": 1, "logger": rows, **flags}
    trainer = make_trainer(precision=precision, **flags)
    trainer.fit(task, loader(name) if data is None else data, ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    losses = [value for _, value in rows.of("loss_step")]
    epochs = [row[name] for _, row in rows.rows for name in ("loss_epoch", "val_loss") if name in row]
    found = describe(task.net, trainer.optimizers[0], task.norms, losses, epochs)
    return found, {"seeds": task.seeds, "losses": losses, "epochs": epochs}


def plain(name, precision, epochs, seeds):
    """Train in a loop without Treadle, which adds the micro-batches of a step in a binary tree."""
    model, norms, losses, means, seeds = build(name), [], [], [], iter(seeds)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)

    def tree(sums, start, size):
        if size == 1:
            return sums[start] if start < len(sums) else None
        left, right = tree(sums, start, size // 2), tree(sums, start + size // 2, size // 2)
        return left if right is None else [a + b for a, b in zip(left, right, strict=True)]

    batches = loader(name)
    for _ in range(epochs):
        leaves, every = list(batches), []
        for first in range(0, len(leaves), V):
            group, sums, weighted = leaves[first : first + V], [], []
            total = sum(len(batch[0]) for batch in group)
            for batch in group:
                torch.manual_seed(next(seeds))
                with torch.autocast("cpu", torch.bfloat16, enabled=precision != "32-true"):
                    loss = model.loss(batch)
                weighted.append((loss.item() * len(batch[0]), len(batch[0])))
                (loss * (len(batch[0]) / total)).backward()
                sums.append([p.grad for p in model.parameters()])
                optimizer.zero_grad()
            for parameter, gradient in zip(model.parameters(), tree(sums, 0, V), strict=True):
                parameter.grad = gradient + 0.0
            norms.append(clip(list(model.parameters()), CLIP[name]))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(math.fsum(value for value, _ in weighted) / total)
            every += weighted
        means.append(math.fsum(value for value, _ in every) / SAMPLES)
    return describe(model, optimizer, norms, losses, means)


SHORT = (
    ("mlp", "32-true", 5),
    ("mlp", "bf16-mixed", 1),
    ("transformer", "32-true", 1),
    ("transformer", "bf16-mixed", 2),
)
LONG = tuple((name, precision, 70) for name in CLIP for precision in ("32-true", "bf16-mixed"))
STRATEGIES = "ddp", "fsdp"


def strategy_of(name):
    return treadle.strategies.FSDP(auto_wrap_policy={nn.Linear}) if name == "fsdp" else name


def fit_all(cases, strategies=STRATEGIES):
    """Train each case with each strategy, of which FSDP gathers each linear layer apart."""
    flags = {"step_micro_batches": V}
    return {name: [fit(*case, strategy=strategy_of(name), **flags)[0] for case in cases] for name in strategies}


@functools.cache
def alone(case):
    return fit(*case, step_micro_batches=V)


@functools.cache
def plain_result(case):
    return plain(*case, alone(case)[1]["seeds"])


def check(ranks, cases):
    expected = list(map(plain_result, cases))
    assert [found for found, _ in map(alone, cases)] == expected
    for rank, by_strategy in enumerate(ranks):
        for strategy, results in by_strategy.items():
            keys = ("weights", "moments", "norms") if rank else tuple(expected[0])  # only rank zero logs
            for case, found, right in zip(cases, results, expected, strict=True):
                assert {key: found[key] for key in keys} == {key: right[key] for key in keys}, (strategy, case)


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 3, pytest.param(V, marks=pytest.mark.exhaustive)])
def test_the_bits_of_a_plain_loop_on_every_number_of_processes(world):
    check(run(fit_all, world, SHORT, timeout=600), SHORT)


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_bits_after_many_steps(world):
    check(run(fit_all, world, LONG, timeout=900), LONG)
    assert plain_result(LONG[0])["steps"] == 210


def fit_without(world):
    flags = {"accumulate_grad_batches": V // world}
    return [fit("mlp", "32-true", 10, strategy=strategy_of(name), **flags)[0]["weights"] for name in STRATEGIES]


@pytest.mark.long
def test_ordinary_sums_depend_on_the_number_of_processes():
    one, two = (run(fit_without, world, world)[0] for world in (1, 2))
    assert all(a != b for a, b in zip(one, two, strict=True))


# -- resuming ------------------------------------------------------------------------------------------------------


def fit_until(options):
    return fit("mlp", "32-true", 4, step_micro_batches=V, **options | {"strategy": strategy_of(options["strategy"])})


@pytest.fixture(scope="module")
def saved_within_epoch(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("same_bits") / "within.ckpt")
    run(fit_until, 2, {"strategy": "ddp", "save": path, "max_steps": 4})
    return path, fit("mlp", "32-true", 4, step_micro_batches=V)


def check_resumed(results, whole, record, steps):
    for found, _ in results:
        assert (found["weights"], found["moments"], found["steps"]) == (whole["weights"], whole["moments"], steps)
    assert results[0][1]["losses"] == record["losses"][-steps:]
    assert results[0][1]["epochs"] == record["epochs"][-math.ceil(steps / 3) :]


def test_resume_within_epochs_from_ddp_on_fsdp_and_on_one_process(saved_within_epoch, tmp_path):
    path, (whole, record) = saved_within_epoch
    second = str(tmp_path / "second.ckpt")
    run(fit_until, 2, {"strategy": "fsdp", "ckpt_path": path, "save": second, "max_steps": 8})
    check_resumed(run(fit_until, 1, {"strategy": "auto", "ckpt_path": second}), whole, record, 12 - 8)
    third = str(tmp_path / "third.ckpt")
    fit("mlp", "32-true", 4, step_micro_batches=V, max_steps=8, save=third)
    digests = {OpenCheckpoint(saved).manifest.info["weights_digest"] for saved in (second, third)}
    assert len(digests) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_resume_within_an_epoch_on_another_number_of_processes(world, strategy, saved_within_epoch):
    path, (whole, record) = saved_within_epoch
    check_resumed(run(fit_until, world, {"strategy": strategy, "ckpt_path": path}), whole, record, 12 - 4)


def test_a_checkpoint_of_other_micro_batches_is_refused(saved_within_epoch):
    path, _ = saved_within_epoch
    with pytest.raises(
        ValueError, match=r"saved with step_micro_batches=8 and batch_size=3, but this run has .*=4 and"
    ):
        fit("mlp", "32-true", 4, step_micro_batches=4, ckpt_path=path)
    with pytest.raises(ValueError, match=r"but this run has no step_micro_batches"):
        fit("mlp", "32-true", 4, ckpt_path=path)


# -- settings ------------------------------------------------------------------------------------------------------


class Noisy(Dataset):
    """Samples with noise from each of the three generators."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        inputs, target = self.samples[index]
        return inputs + 0.1 * torch.randn(11) + random.random() + np.random.random(), target


class Weighted(Task):
    """A task whose micro-batches are weighted by a number of tokens."""

    def training_step(self, batch, index):
        return {"loss": super().training_step(batch, index), "weight": int(batch[1].sum()) + 1}


class Branching(Task):
    """A task of two optimizers, with a layer that only some micro-batches use."""

    def __init__(self, name):
        super().__init__(name)
        self.extra = nn.Linear(11, 37)

    def training_step(self, batch, index):
        hidden = self.net.layers[0](batch[0])
        if batch[0].sum() > 0:
            hidden = hidden + self.extra(batch[0])
        loss = nn.functional.cross_entropy(self.net.layers[1:](hidden), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return [
            torch.optim.AdamW(self.net.parameters(), lr=0.01),
            torch.optim.SGD(self.extra.parameters(), lr=0.1, momentum=0.9),
        ]


class Plateau(Task):
    """A task whose learning rate, and whose end, depend on a loss in validation."""

    def validation_step(self, batch, index):
        self.log("val_loss", self.net.loss(batch) + 1e-3 * torch.rand(()))

    def val_dataloader(self):
        return DataLoader(torch.utils.data.Subset(dataset("mlp"), range(29)), batch_size=SIZE)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def fit_own_loop():
    torch.manual_seed(1)
    accelerator = treadle.Accelerator(cpu=True, step_micro_batches=V)
    model = build("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader("mlp"))
    norms = []
    for _ in range(2):
        for inputs, targets in batches:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.3))
                optimizer.step()
                optimizer.zero_grad()
    return describe(accelerator.unwrap_model(model), optimizer, norms, [], [])


class Recomputed(Task):
    """A task that computes the activations of its layers, and their dropout masks, again in the backward pass."""

    def training_step(self, batch, index):
        layers = self.net.layers
        hidden = torch.utils.checkpoint.checkpoint(layers[:-1], batch[0], use_reentrant=False)
        return nn.functional.cross_entropy(layers[-1](hidden), batch[1])


class WithMuon(Task):
    """A task whose matrices are orthogonalized by Muon, which FSDP gathers for that."""

    def configure_optimizers(self):
        return treadle.optim.muon_with_adamw(self.net, lr=0.02)


def fit_hybrid(replicas):
    strategy = treadle.strategies.FSDP(auto_wrap_policy={nn.Linear}, data_parallel_replicate=replicas)
    return fit("mlp", "32-true", 3, strategy=strategy, step_micro_batches=V)


def fit_more_settings():
    """Train with what changes how gradients are computed, or how they are used."""
    results = {}
    for name in STRATEGIES:
        flags = {"strategy": strategy_of(name), "step_micro_batches": V}
        average = treadle.callbacks.EMAWeightAveraging(decay=0.5)
        results |= {
            f"recomputation, {name}": fit("mlp", "32-true", 2, task=Recomputed("mlp"), **flags),
            f"float16, {name}": fit("mlp", "16-mixed", 2, **flags),
            f"average, {name}": fit("mlp", "32-true", 2, callbacks=average, **flags),
            f"compiled, {name}": fit("mlp", "32-true", 2, compile={"backend": "aot_eager"}, **flags),
            f"Muon, {name}": fit("mlp", "32-true", 2, task=WithMuon("mlp"), **flags),
        }
    return {name: found for name, (found, _) in results.items()}


def fit_settings():
    flags = {"step_micro_batches": V}
    few = {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True}
    ddp = treadle.strategies.DDP
    stopping = treadle.callbacks.EarlyStopping("val_loss", patience=2, min_delta=0.1)
    few_batches = {"limit_train_batches": 10, "val_check_interval": 0.5, "limit_val_batches": 3}
    noisy = {"dataset": Noisy(dataset("mlp")), "batch_size": SIZE, "shuffle": True}
    results = {
        "buckets": fit("transformer", "32-true", 2, strategy=ddp(**few), **flags),
        "zero": fit("mlp", "32-true", 2, strategy=ddp(zero=True), **flags),
        "weights": fit("mlp", "32-true", 2, strategy="ddp", task=Weighted("mlp"), **flags),
        "unused": fit("mlp", "32-true", 3, strategy=ddp(find_unused_parameters=True), task=Branching("mlp"), **flags),
        "noise": fit("mlp", "32-true", 2, strategy="ddp", data=DataLoader(**noisy), **flags),
        "workers": fit("mlp", "32-true", 2, strategy="ddp", data=DataLoader(**noisy, num_workers=2), **flags),
        "fast": fit("mlp", "32-true", 2, strategy="ddp", fast_dev_run=True, **flags),
        "validation": fit("mlp", "32-true", 30, strategy="ddp", task=Plateau("mlp"), callbacks=[stopping], **flags),
        "limits": fit("mlp", "32-true", 3, strategy="ddp", task=Plateau("mlp"), **few_batches, **flags),
    }
    return {name: found for name, (found, _) in results.items()} | {"own loop": fit_own_loop()}


@functools.cache
def settings_alone(function):
    return run(function, 1)[0]


@pytest.mark.long
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_settings_that_keep_the_bits(world):
    ranks, expected = run(fit_settings, world), settings_alone(fit_settings)
    assert expected["noise"] == expected["workers"]
    assert expected["fast"]["steps"] == 1
    assert expected["limits"]["steps"] == 6
    assert 10 < expected["validation"]["steps"] < 90  # the run stops early
    for rank, ranks_results in enumerate(ranks):
        for name, found in ranks_results.items():
            keys = ("weights", "norms") if rank or name in ("zero", "fast") else tuple(found)
            assert {key: found[key] for key in keys} == {key: expected[name][key] for key in keys}, name


@pytest.mark.long
@pytest.mark.parametrize(("world", "replicas"), [(4, 2), pytest.param(8, 4, marks=pytest.mark.exhaustive)])
def test_hybrid_sharding_keeps_the_bits(world, replicas):
    expected, record = fit("mlp", "32-true", 3, step_micro_batches=V)
    ranks = run(fit_hybrid, world, replicas)
    assert ranks[0] == (expected, record | {"seeds": ranks[0][1]["seeds"]})
    assert all(found[key] == expected[key] for found, _ in ranks for key in ("weights", "moments", "norms"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [2, 4])
def test_more_settings_that_keep_the_bits(world):
    expected = settings_alone(fit_more_settings)
    for kind in ("recomputation", "float16", "average", "compiled", "Muon"):
        assert expected[f"{kind}, ddp"] == expected[f"{kind}, fsdp"]
    for ranks_results in run(fit_more_settings, world, timeout=300):
        for name, found in ranks_results.items():
            assert {key: found[key] for key in ("weights", "norms")} == {
                key: expected[name][key] for key in ("weights", "norms")
            }, name


# -- refusals ------------------------------------------------------------------------------------------------------


class OwnGenerator(Noisy):
    def __init__(self, samples):
        super().__init__(samples)
        self.generator = torch.Generator()


def odd(**members):
    """A task with other members."""
    return type("Odd", (Task,), members)("mlp")


def normalized():
    task = Task("mlp")
    task.net.layers.insert(1, nn.BatchNorm1d(37))
    return task


def weigh_by_half(task, batch, index):
    return {"loss": task.net.loss(batch), "weight": 0.5}


def with_closure(task):
    return torch.optim.LBFGS(task.parameters())


def fused(task):
    return torch.optim.AdamW(task.parameters(), fused=True)


def reduced():
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return treadle.strategies.FSDP(mixed_precision=policy)


def own_sampler():
    data = dataset("mlp")
    return DataLoader(data, batch_size=SIZE, sampler=torch.utils.data.DistributedSampler(data, 2, 0))


@pytest.mark.parametrize(
    ("message", "options"),
    [
        (r"BatchNorm1d in training mode \(net\.layers\.1\)", {"task": normalized}),
        (r"can't be combined with automatic_optimization=False", {"task": lambda: odd(automatic_optimization=False)}),
        (r"can't be combined with LBFGS", {"task": lambda: odd(configure_optimizers=with_closure)}),
        (r"weight=0\.5 must be a whole number", {"task": lambda: odd(training_step=weigh_by_half)}),
        (r"can't be combined with the stream of a Stream", {"data": lambda: DataLoader(Stream(dataset("mlp")), SIZE)}),
        (r"can't be combined with a list", {"data": lambda: [next(iter(loader("mlp")))]}),
        (
            r"OwnGenerator, which draws from a generator of its own",
            {"data": lambda: DataLoader(OwnGenerator(dataset("mlp")))},
        ),
        (r"a dataloader that is already sharded", {"data": own_sampler}),
        (r"already sharded", {"use_distributed_sampler": False}),
        (r"gradient_accumulation_steps=2", {"accumulate_grad_batches": 2}),
        (
            r"Trainer\(step_micro_batches=8\) and GradientAccumulationScheduler both set",
            {"callbacks": lambda: [treadle.callbacks.GradientAccumulationScheduler({0: 2})]},
        ),
        (r"DDP\(comm_hook=\.\.\.\)", {"strategy": lambda: treadle.strategies.DDP(comm_hook="bf16")}),
        (r"DDP\(sync_batchnorm=\.\.\.\)", {"strategy": lambda: treadle.strategies.DDP(sync_batchnorm=True)}),
        (r"DDP\(static_graph=\.\.\.\)", {"strategy": lambda: treadle.strategies.DDP(static_graph=True)}),
        (r"can't be combined with AdamW\(fused=True\)", {"task": lambda: odd(configure_optimizers=fused)}),
        (r"FSDP\(mixed_precision=\.\.\.\), which adds gradients in another dtype", {"strategy": reduced}),
        (
            r"val_check_interval=8 with check_val_every_n_epoch=None counts the batches of a process",
            {"task": lambda: Plateau("mlp"), "val_check_interval": 8, "check_val_every_n_epoch": None},
        ),
    ],
)
def test_what_can_not_hold_is_refused(message, options):
    made = {name: value() if callable(value) else value for name, value in options.items()}
    task = made.get("task") or Task("mlp")
    before = digest(parameter.detach().reshape(-1) for parameter in task.parameters())
    with pytest.raises(ValueError, match=message):
        fit("mlp", "32-true", 1, **{"step_micro_batches": V, **made, "task": task})
    assert digest(parameter.detach().reshape(-1) for parameter in task.parameters()) == before


def test_methods_that_decide_about_reductions_are_refused():
    accelerator = treadle.Accelerator(cpu=True, step_micro_batches=V)
    model = accelerator.prepare(build("mlp"))
    model(torch.ones(1, 11)).sum().backward()
    methods = {
        "no_sync": lambda: accelerator.no_sync(model),
        "trigger_sync_in_backward": lambda: accelerator.trigger_sync_in_backward(model),
        "join_uneven_inputs": lambda: accelerator.join_uneven_inputs([model]),
        "LocalSGD": lambda: treadle.LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8),
    }
    for name, call in methods.items():
        with pytest.raises(ValueError, match=f"{name} can't be used with step_micro_batches=8"):
            call()
    with pytest.raises(ValueError, match="norm_type=3 must be 1, 2 or inf with step_micro_batches"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0, 3)
    inputs, _ = next(iter(accelerator.prepare(loader("mlp"))))
    with pytest.raises(ValueError, match=r"within accelerator\.accumulate\(model\)"):
        accelerator.backward(model(inputs).mean())


class Unused(Branching):
    """A task with a layer that only the second micro-batch of a step uses."""

    configure_optimizers = Task.configure_optimizers

    def training_step(self, batch, index):
        loss = Task.training_step(self, batch, index)
        return loss + self.extra(batch[0]).mean() if index == 1 else loss


def find_refusals_of_ranks():
    rank = treadle.Accelerator(cpu=True).process_index
    cases = {
        "own data": {"data": DataLoader(TensorDataset(*(t[rank::2] for t in dataset("mlp").tensors)))},
        "tensor_parallel_size": {"strategy": treadle.strategies.FSDP(tensor_parallel_size=2)},
        "data_parallel_replicate": {"strategy": treadle.strategies.FSDP(data_parallel_replicate=2)},
        "unused": {"task": Unused("mlp"), "strategy": strategy_of("fsdp")},
    }
    errors = {}
    for name, options in cases.items():
        with pytest.raises(ValueError, match="step_micro_batches") as caught:
            fit("mlp", "32-true", 1, step_micro_batches=V, **{"strategy": "ddp", **options})
        errors[name] = str(caught.value)
    return errors


def test_refusals_of_several_ranks():
    expected = {
        "own data": "a DataLoader of each rank's own data",
        "tensor_parallel_size": "FSDP(tensor_parallel_size=...)",
        "data_parallel_replicate": "needs a power of two of processes, not 2, with at least 2 for each of 2 replicas",
        "unused": "needs each micro-batch to use all trained parameters",
    }
    for errors in run(find_refusals_of_ranks, 2):
        assert all(words in errors[name] for name, words in expected.items()), errors


def test_a_second_backward_pass_and_skipped_batches_are_refused():
    accelerator = treadle.Accelerator(cpu=True, step_micro_batches=V)
    model = build("mlp")
    model, batches = accelerator.prepare(model, loader("mlp"))
    running = iter(batches)
    inputs, _ = next(running)
    with accelerator.accumulate(model):
        accelerator.backward(model(inputs).mean())
        with pytest.raises(ValueError, match="one backward pass per micro-batch"):
            accelerator.backward(model(inputs).mean())
    running.close()
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=2 can't be set with step_micro_batches"):
        accelerator.gradient_accumulation_steps = 2
    with pytest.raises(ValueError, match="each batch of a prepared DataLoader once"):  # noqa: PT012
        for number, (inputs, _) in enumerate(batches):
            if number != 1:
                with accelerator.accumulate(model):
                    accelerator.backward(model(inputs).mean())
