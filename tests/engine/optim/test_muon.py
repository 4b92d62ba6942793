"""Muon for hidden matrices with AdamW for the rest: which is which, and the same steps on one process and on two."""

import math

import pytest
import torch
from support.processes import run
from support.sharded_models import Block
from support.trainers import make_trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import ModelCheckpoint

import treadle
from treadle.optim import muon_with_adamw

VOCABULARY, WIDTH = 30, 16


class Language(treadle.TaskModule):
    """Predicts the next token from the last one; the 15 rows of a square matrix are cut unevenly by two ranks."""

    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.mix = nn.Linear(WIDTH, 15, bias=False)
        self.out = nn.Linear(15, VOCABULARY, bias=False)
        if tied:
            self.mix, self.out = nn.Identity(), nn.Linear(WIDTH, VOCABULARY, bias=False)
            self.out.weight = self.tokens.weight

    def training_step(self, batch, batch_idx):
        x = self.tokens(batch[0])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.out(self.mix(x)), batch[1])

    def configure_optimizers(self):
        return muon_with_adamw(self, lr=0.02, adamw_lr=0.01, weight_decay=0.1)


def split_names(module, **options):
    names = {parameter: name for name, parameter in module.named_parameters()}
    groups = [group for optimizer in muon_with_adamw(module, 0.1, **options) for group in optimizer.param_groups]
    return [{names[parameter] for parameter in group["params"]} for group in groups]


HIDDEN = {f"blocks.{number}.{name}.weight" for number in range(2) for name in ("up", "down")}
BIASES = ("norm.weight", "norm.bias", "up.bias", "down.bias")
VECTORS = {f"blocks.{number}.{name}" for number in range(2) for name in BIASES}


def test_hidden_matrices_get_muon():
    assert split_names(Language()) == [HIDDEN | {"mix.weight"}, {"tokens.weight", "out.weight"}, VECTORS]
    assert split_names(Language(tied=True)) == [HIDDEN, {"tokens.weight"}, VECTORS]
    up = {"blocks.0.up.weight", "blocks.1.up.weight"}
    assert split_names(Language(tied=True), adamw=["*.up.weight"]) == [HIDDEN - up, {"tokens.weight"} | up, VECTORS]
    matrices = HIDDEN | {"mix.weight", "tokens.weight", "out.weight"}
    assert split_names(Language(), adamw=["*"]) == [matrices, VECTORS]  # all in AdamW, for a comparison


def test_names_and_shapes_that_are_no_hidden_matrix():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches, self.pos_embed = nn.Conv2d(3, 8, 4), nn.Parameter(torch.zeros(9, 8))
            self.hidden, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
            self.relative_position_bias_table = nn.Parameter(torch.zeros(9, 2))
            self.classifier, self.experts = nn.Linear(8, 5), nn.Parameter(torch.zeros(2, 8, 8))

    others = {"patches.weight", "pos_embed", "relative_position_bias_table", "classifier.weight", "experts"}
    assert split_names(Parts()) == [{"hidden.weight"}, others, {"patches.bias", "hidden.bias", "classifier.bias"}]


def test_heads_of_transformers_models():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=30))
    muon, matrices, vectors = split_names(llama)
    assert matrices == {"model.embed_tokens.weight", "lm_head.weight"}
    assert len(muon) == 7
    assert vectors == {name for name, p in llama.named_parameters() if p.ndim == 1}
    bert = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, vocab_size=30))
    outside = [name for name in split_names(bert)[0] if "layer.0" not in name]
    assert outside == ["cls.predictions.transform.dense.weight"]


def test_the_split_is_announced(caplog):
    with caplog.at_level("INFO", "treadle"):
        muon_with_adamw(Language(), 0.1)
    (line,) = caplog.messages
    assert "Muon: 5 tensors with 2,288 elements (blocks.*.up.weight, blocks.*.down.weight, mix.weight)" in line
    assert "AdamW: 10 tensors with 1,090 elements (tokens.weight, blocks.*.norm.weight, " in line


def test_errors():
    with pytest.raises(ValueError, match="Embedding has no hidden matrix that is trained"):
        muon_with_adamw(nn.Embedding(3, 2), 0.1)
    with pytest.raises(ValueError, match="adamw='up' matches no trained parameter"):
        muon_with_adamw(Language(), 0.1, adamw=["up"])


# -- training -------------------------------------------------------------------------------------------------------

STEPS, SAMPLES = 6, 16


def make_data():
    tokens = torch.randint(VOCABULARY, (STEPS * SAMPLES, 2), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens[:, 0], tokens[:, 1])


def train(root, strategy="auto", ranks=1, ckpt_path=None):
    """Train with clipping by one norm; return the trainer and its weights."""
    task = Language()
    saver = ModelCheckpoint(f"{root}/c", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    options = {"gradient_clip_val": 0.5, "enable_checkpointing": True, "callbacks": saver}
    trainer = make_trainer(strategy=strategy, devices=ranks, **options)
    trainer.fit(task, DataLoader(make_data(), SAMPLES // ranks), ckpt_path=ckpt_path)
    weights = trainer.accelerator.get_state_dict(task)  # of sharded tensors only on rank zero
    return trainer, {name: value.clone() for name, value in weights.items() if value is not None}


def train_by_hand():
    """The loop that a user would write with torch's optimizers."""
    model = Language()
    names = dict(model.named_parameters())
    muon = torch.optim.Muon(
        [p for n, p in names.items() if n in HIDDEN | {"mix.weight"}], 0.02, 0.1, adjust_lr_fn="match_rms_adamw"
    )
    groups = [{"params": [names["tokens.weight"], names["out.weight"]], "weight_decay": 0.1}]
    groups.append({"params": [p for n, p in names.items() if n in VECTORS], "weight_decay": 0.0})
    adamw = torch.optim.AdamW(groups, lr=0.01)
    for batch in DataLoader(make_data(), SAMPLES):
        model.training_step(batch, 0).backward()
        # In the order of the optimizers: another one may change the norm's last bit, and so one of Muon's roundings to
        # bfloat16, which is 3.5e-4 of a matrix (seen on an Intel CPU).
        ordered = (*muon.param_groups, *adamw.param_groups)
        nn.utils.clip_grad_norm_([parameter for group in ordered for parameter in group["params"]], 0.5)
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def measure_distance(weights, expected):
    """Return the largest relative distance of a tensor, by the Frobenius norm."""
    return max(float((weights[name] - value).norm() / value.norm()) for name, value in expected.items())


def test_one_process_is_the_loop_by_hand(tmp_path):
    _, weights = train(tmp_path)
    assert measure_distance(weights, train_by_hand()) < 1e-6


def train_on_two(root):
    from torch.distributed.tensor.debug import CommDebugMode

    results = {}
    for name in ("ddp", "fsdp", "zero"):
        strategy = treadle.strategies.DDP(zero=True) if name == "zero" else name
        trainer, whole = train(f"{root}/{name}", strategy, 2)
        muon, held = trainer.optimizers[0], 0
        for parameter, state in muon.state.items():
            parameter.grad = buffer = state["momentum_buffer"].clone()
            held += (buffer.to_local() if name == "fsdp" else buffer).numel()
        with CommDebugMode() as counted:
            muon.step()
        _, resumed = train(f"{root}/{name}-again", strategy, 2, ckpt_path=f"{root}/{name}/c/step=3.ckpt")
        same = [name for name, value in whole.items() if torch.equal(resumed[name], value)]
        results[name] = whole, held, len(same), counted.get_total_counts()
    return results


@pytest.mark.long
def test_two_processes_are_one_within_the_rounding_of_newton_schulz(tmp_path):
    expected = train_by_hand()
    (first, second) = run(train_on_two, 2, str(tmp_path))
    matrices = 2 * 2 * 2 * WIDTH * WIDTH + 15 * WIDTH
    for name, (weights, held, same, counts) in first.items():
        assert measure_distance(weights, expected) < 1e-2, name
        assert same == len(expected), name  # a run that resumed in the middle, bit for bit
        if name != "ddp":  # each process has its share of the momentum
            assert held + second[name][1] == matrices
            assert math.isclose(held, matrices / 2, rel_tol=0.2)
        if name == "fsdp":
            assert counts == 6  # both ranks compute one of two matrices of a shape, whose shards are sent and returned
    assert all(torch.equal(first["zero"][0][name], first["ddp"][0][name]) for name in expected)
