"""Precisions as Lightning's plugins."""

import pytest
import torch
from support.processes import in_own_process, run
from support.trainers import make_trainer, says
from torch import nn
from treadle.compat.demos.boring_classes import BoringModel
from treadle.compat.fabric import Fabric
from treadle.compat.plugins import (
    BitsandbytesPrecision,
    DoublePrecision,
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from treadle.compat.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from treadle.strategies import FSDPStrategy


@pytest.mark.parametrize(
    ("plugins", "precision", "dtype"),
    [
        (MixedPrecision("bf16-mixed", "cpu"), "bf16-mixed", torch.float32),
        (HalfPrecision("bf16-true"), "bf16-true", torch.bfloat16),
        ([DoublePrecision()], "64-true", torch.float64),
    ],
)
def test_precisions_as_plugins(plugins, precision, dtype) -> None:
    task, trainer = BoringModel(), make_trainer(plugins=plugins, fast_dev_run=1)
    trainer.fit(task)
    assert (trainer.precision, trainer.precision_plugin.precision) == (precision, precision)
    assert task.layer.weight.dtype == dtype


def test_plugins_that_are_refused() -> None:
    with pytest.raises(ValueError, match="precision='16-true' is not one of 16-mixed, bf16-mixed"):
        MixedPrecision("16-true", "cuda")
    with pytest.raises(ValueError, match="a run creates its own gradient scaler"):
        MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="both set the precision"):
        make_trainer(precision="64-true", plugins=DoublePrecision())
    with says(TypeError, "must be a treadle.plugins.Precision, TorchSyncBatchNorm() or CheckpointIO"):
        make_trainer(plugins=object())
    assert isinstance(TorchSyncBatchNorm(), LayerSync)


def test_precisions_have_the_attributes_of_plugins() -> None:
    assert Precision() == Precision(name="32-true")
    plugin = MixedPrecision("bf16-mixed", "cpu")
    assert plugin.scaler is None
    with plugin.autocast_context_manager():
        assert nn.Linear(1, 1)(torch.ones(1, 1)).dtype == torch.bfloat16
    trainer = make_trainer(precision="16-mixed")
    assert trainer.precision_plugin.device == "cpu"
    assert trainer.precision_plugin.scaler is trainer.scaler is not None
    assert trainer.precision_plugin == Precision.parse("16-mixed")
    assert isinstance(make_trainer(plugins=plugin).precision_plugin, MixedPrecision)


def test_a_plugin_with_recomputed_activations() -> None:
    task, calls = BoringModel(), []
    task.layer.register_forward_pre_hook(
        lambda *_: calls.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
    )
    strategy = FSDPStrategy(activation_checkpointing_policy={nn.Linear})
    make_trainer(plugins=FSDPPrecision("bf16-mixed"), strategy=strategy, fast_dev_run=1).fit(task)
    # The forward pass, again in the backward pass, and validation, all in the plugin's precision.
    assert calls == [(True, True), (True, True), (False, True)]


MODES = {"nf4": torch.bfloat16, "nf4-dq": torch.bfloat16, "fp4": torch.float32, "fp4-dq": torch.float16, "int8": None}


@in_own_process  # bitsandbytes has an AdamW of its own, so that the name in a configuration file would be ambiguous
def test_quantized_weights() -> None:
    """They come close to the model, and are the same from its weights, from their own, and after a forward pass."""
    for mode in (*MODES, "int8-training"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64, bias=False), nn.LayerNorm(64))
        weights, batch = {name: value.clone() for name, value in net.state_dict().items()}, torch.randn(4, 64)
        expected = net(batch).detach()
        plugin = BitsandbytesPrecision(mode, MODES.get(mode))
        model = Fabric(accelerator="cpu", devices=1, plugins=plugin).setup_module(net)
        assert net[0].weight.dtype is {"int8": torch.int8, "int8-training": torch.float16}.get(mode, torch.uint8)
        assert net[0].weight.requires_grad is (mode == "int8-training")
        assert net[0].bias.dtype is net[3].weight.dtype is plugin.storage
        output = model(batch).detach()
        assert 0 < (output - expected).abs().max() < (0.05 if mode.startswith("int8") else 1)
        own = {name: value.clone() for name, value in model.state_dict().items()}
        for state in (weights, own):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            model.load_state_dict(state)
            assert torch.equal(model(batch), output)


class Quantized(BoringModel):
    """A body to quantize, and a head to train."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))

    def forward(self, x):
        return self.layer(self.body(x))

    def configure_optimizers(self):
        return torch.optim.SGD([parameter for parameter in self.parameters() if parameter.requires_grad], 0.05)


def fit_quantized(folder: str, mode: str, epochs: int, ckpt_path=None, **settings) -> dict[str, torch.Tensor]:
    plugin, task = BitsandbytesPrecision(mode, MODES[mode], ignore_modules={"layer"}), Quantized()
    trainer = make_trainer(plugins=plugin, max_epochs=epochs, limit_train_batches=4, limit_val_batches=0, **settings)
    trainer.fit(task, ckpt_path=ckpt_path)
    assert type(task.body[0]).__name__ == ("Linear8bitLt" if mode == "int8" else "Linear4bit")
    assert type(task.layer) is nn.Linear
    trainer.save_checkpoint(f"{folder}/{epochs}.ckpt")
    return {name: value.clone() for name, value in task.state_dict().items()}


@in_own_process
def test_a_run_with_quantized_layers_resumes(tmp_path) -> None:
    for mode in ("nf4", "fp4", "int8"):
        whole = fit_quantized(str(tmp_path), mode, 2)
        fit_quantized(str(tmp_path), mode, 1)
        resumed = fit_quantized(str(tmp_path), mode, 2, str(tmp_path / "1.ckpt"))
        same = {name: torch.equal(value, whole[name]) for name, value in resumed.items()}
        assert same == dict.fromkeys(whole, True), mode


def test_quantized_layers_on_two_ranks(tmp_path) -> None:
    first, second = run(fit_on_ranks, 2, str(tmp_path))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def fit_on_ranks(folder: str) -> dict[str, torch.Tensor]:
    return fit_quantized(folder, "nf4", 1, strategy="ddp", devices=2)


def test_quantizations_that_are_refused() -> None:
    with says(ValueError, "mode='nf5' is not one of nf4, nf4-dq, fp4,", "Did you mean 'nf4'?"):
        BitsandbytesPrecision("nf5")
    with says(ValueError, "mode='int8' only works with `dtype=torch.float16`, not torch.bfloat16."):
        BitsandbytesPrecision("int8", torch.bfloat16)
    with says(ValueError, "with `dtype=torch.float16 or torch.bfloat16 or torch.float32`, not torch.float64."):
        BitsandbytesPrecision("nf4", torch.float64)
    with says(TypeError, "BoringModel has no submodule of type torch.nn.Linear, so nothing would be quantized."):
        task = BoringModel()
        task.layer = nn.Conv1d(1, 1, 1)
        make_trainer(plugins=BitsandbytesPrecision("nf4"), fast_dev_run=1).fit(task)
    with says(ValueError, "strategy='fsdp' does not support BitsandbytesPrecision, which replaces layers."):
        make_trainer(plugins=BitsandbytesPrecision("nf4"), strategy="fsdp", fast_dev_run=1).fit(BoringModel())
