"""transformers' models in a Trainer: exact gradients over tokens, generation, adapters, on one rank and on two."""

import functools

import pytest
import torch
from support.models import Stream
from support.processes import run
from support.trainers import NO_OUTPUT, make_trainer, says
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from treadle.callbacks import ModelCheckpoint
from treadle.common.optional import is_installed
from treadle.engine.checkpoint import OpenCheckpoint
from treadle.integrations import TransformersTask

import treadle
from treadle.data import pack

pytestmark = pytest.mark.long

transformers = pytest.importorskip("transformers")

VOCABULARY = 48
# Texts of very different lengths, so that means over batches and over tokens are far apart.
LENGTHS = [3, 12, 5, 20, 4, 4, 18, 7, 9, 3, 16, 6]


SIZES = {"vocab_size": VOCABULARY, "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}


def make(name, seed=0, **options):
    """A small model of one of transformers' classes."""
    torch.manual_seed(seed)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**{**SIZES, "intermediate_size": 16, "max_position_embeddings": 32, **options}))


def causal(seed=0, dropout=0.0):
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return make("GPT2LMHeadModel", seed, **tokens, **dropouts)


untied = functools.partial(make, "LlamaForCausalLM", num_hidden_layers=2)
opt = functools.partial(make, "OPTForCausalLM", ffn_dim=16, word_embed_proj_dim=16, dropout=0.0)
classifier = functools.partial(make, "BertForSequenceClassification", num_labels=3)
translator = functools.partial(
    make, "T5ForConditionalGeneration", num_layers=1, d_kv=8, d_ff=16, decoder_start_token_id=0, pad_token_id=0,
    eos_token_id=2, dropout_rate=0.0,
)  # fmt: skip


def texts(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


def pad(rows, value=0):
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def collate_causal(rows):
    return {
        "input_ids": pad(rows), "attention_mask": pad([[1] * len(row) for row in rows]), "labels": pad(rows, -100),
    }  # fmt: skip


def collate_classes(rows):
    ids = pad(rows)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([len(r) % 3 for r in rows])}


def collate_pairs(rows):
    return collate_causal(rows) | {"labels": pad([row[::-1] for row in rows], -100)}


KINDS = {
    "causal": (causal, collate_causal),
    "untied": (untied, collate_causal),
    "opt": (opt, collate_causal),
    "classes": (classifier, collate_classes),
    "pairs": (translator, collate_pairs),
}
FEW_KINDS = ["causal", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("classes", "pairs"))]
WORLDS = [("ddp", 2), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in (("auto", 1), ("fsdp", 2)))]


def whole_gradient_step(kind, lr=0.1):
    """By hand: one SGD step on the mean over all tokens, or samples, of all texts at once, in float64."""
    build, collate = KINDS[kind]
    model = build().double().eval()
    batch = collate(texts())
    model(**batch).loss.backward()
    return {name: p.detach() - lr * p.grad for name, p in model.named_parameters() if p.grad is not None}


class PlainTask(TransformersTask):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def one_step(kind, strategy="auto", loss="model", packed=False):
    build, collate = KINDS[kind]
    task = PlainTask(build().eval(), loss=loss)
    task.eval()
    trainer = make_trainer(strategy=strategy, precision="64-true", accumulate_grad_batches=99)
    trainer.fit(task, DataLoader(pack(texts(), 24), 2) if packed else DataLoader(texts(), 2, collate_fn=collate))
    assert not any(part.training for part in task.model.modules())
    return {n.removeprefix("model."): p for n, p in trainer.accelerator.get_state_dict(task).items()}


@pytest.fixture(scope="module")
def compute(tmp_path_factory):
    """Return what each rank computes. Each imports transformers, so the default variants share one launch."""
    folder = tmp_path_factory.mktemp("adapters")
    causal(dropout=0.1).save_pretrained(folder / "ddp-2" / "base")
    by_two = functools.cache(lambda: run(compute_by_two, 2, folder))

    def compute(work, ranks, kind, strategy):
        if (ranks, kind, strategy) == (2, "causal", "ddp"):
            return [results[work.__name__] for results in by_two()]
        arguments = (
            (folder / f"{strategy}-{ranks}", strategy, 6 // ranks) if work is adapt_and_resume else (kind, strategy)
        )
        return run(work, ranks, *arguments)

    compute.folder = folder
    return compute


def compute_by_two(folder):
    results = {work.__name__: work("causal", "ddp") for work in (one_step, evaluated, generated)}
    if is_installed("peft"):
        results["adapt_and_resume"] = adapt_and_resume(folder / "ddp-2", "ddp", 3)
    return results


@pytest.mark.parametrize(("strategy", "ranks"), WORLDS)
@pytest.mark.parametrize("kind", FEW_KINDS)
def test_the_gradient_is_the_mean_over_all_targets(compute, kind, strategy, ranks):
    expected = whole_gradient_step(kind)
    stepped, *_ = compute(one_step, ranks, kind, strategy)
    for name, value in expected.items():
        # transformers' losses are float32; means of means would be 1e-3 off.
        torch.testing.assert_close(stepped[name], value, rtol=1e-5, atol=1e-8)


def chunked_steps():
    """One step for each way in which the head's weight lies on two ranks: shared, gathered, a unit of its own.

    Another one for each way in which a packed model may be asked there whether it mixes documents.
    """
    parts = functools.partial(treadle.strategies.FSDP, auto_wrap_policy="parts")
    ways = [("causal", "ddp"), ("causal", "fsdp"), ("untied", "fsdp"), ("untied", parts())]
    steps = [(kind, one_step(kind, strategy, "chunked")) for kind, strategy in ways]
    return steps + [("opt", one_step("opt", strategy, packed=True)) for strategy in ("ddp", "fsdp", parts())]


def test_the_gradient_of_the_chunked_loss_is_the_mean_over_all_targets():
    steps = [*run(chunked_steps, 2)[0], ("untied", one_step("untied", "auto", "chunked"))]
    for kind, stepped in steps:
        for name, value in whole_gradient_step(kind).items():
            torch.testing.assert_close(stepped[name], value, rtol=1e-5, atol=1e-8, msg=f"{kind} {name}")


def test_chunked_losses_and_gradients_are_the_models_own():
    """In float32 and with bfloat16, in training and evaluation, with metrics that need the logits."""

    def train_and_validate(loss, precision):
        metrics = {"accuracy": MulticlassAccuracy(VOCABULARY, average="micro")}
        trainer = treadle.Trainer(max_epochs=2, precision=precision, accumulate_grad_batches=2, **NO_OUTPUT)
        task = PlainTask(causal().eval(), loss=loss)
        loader = DataLoader(texts(), 2, collate_fn=collate_causal)
        trainer.fit(task, loader, loader)
        validated, *_ = trainer.validate(PlainTask(task.model, loss=loss, metrics=metrics), loader)
        return task.state_dict(), trainer.callback_metrics["val_loss"], validated

    for precision, tolerance in (("32-true", 1e-6), ("bf16-mixed", 2e-3)):
        (chunked, *logged), (plain, *expected) = (train_and_validate(loss, precision) for loss in ("chunked", "model"))
        torch.testing.assert_close(chunked, plain, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(logged, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("BertForSequenceClassification", "is not a causal language model"),
        ("T5ForConditionalGeneration", "is not a causal language model"),
        ("CohereForCausalLM", "computes more than the head's product"),  # multiplies the logits
        ("Gemma2ForCausalLM", "computes more than the head's product"),  # limits them
        ("MixtralForCausalLM", "adds to the cross-entropy"),  # a loss of its routers
    ],
)
def test_models_whose_loss_is_another_are_refused(name, reason):
    model = make(name, num_key_value_heads=1, output_router_logits=True, eos_token_id=2)
    with pytest.raises(ValueError, match=f"can't replace the loss of {name}, which {reason}"):
        TransformersTask(model, loss="chunked")


@pytest.mark.parametrize("loss", ["model", "chunked"])
@pytest.mark.parametrize("kind", ["causal", "untied", "opt"])
def test_packed_rows_train_like_texts_alone(kind, loss):
    """Although the configuration asks for a cache, with which transformers lets the texts of a row see each other.

    OPT makes no use of position ids to separate them (5.23).
    """
    assert len(pack(texts(), 24)) < len(texts()) / 2
    trained = one_step(kind, loss=loss, packed=True)
    for name, weight in whole_gradient_step(kind).items():
        torch.testing.assert_close(trained[name], weight, atol=1e-8, rtol=0, msg=name)


def test_packed_rows_that_a_model_would_mix_are_refused():
    batch = next(iter(DataLoader(pack(texts(), 24), 2)))
    task = TransformersTask(causal())
    task.model.config._attn_implementation = "flash_attention_2"
    with says(ValueError, "a batch has 2 packed rows, but with attn_implementation='flash_attention_2'"):
        task(batch)
    bloom = TransformersTask(make("BloomForCausalLM"))
    with pytest.raises(ValueError, match=r"results of BloomForCausalLM .* depend on the other .*BudgetBatchSampler"):
        bloom(batch)
    assert bloom.model.training
    batch.pop("seq_idx")  # as from transformers' own collator; its rows are packed if positions start anew
    with pytest.raises(ValueError, match=r"results of BloomForCausalLM"):
        bloom(batch)
    batch["position_ids"] = torch.arange(24).expand(2, 24)
    assert bloom(batch).loss.isfinite()


def test_a_plan_needs_no_values_of_packed_rows():
    batch = next(iter(DataLoader(pack(texts(), 24), 2)))
    with FakeTensorMode() as fake:
        loss = TransformersTask(opt())({name: fake.from_tensor(value) for name, value in batch.items()}).loss
    assert loss.shape == ()


@pytest.mark.parametrize("loss", ["model", "chunked"])
def test_a_batch_without_labels_weighs_nothing(loss):
    """Its mean over nothing is not a number; texts that are all prompt, or of a single token, have no labels."""

    def train_and_validate(rows):
        task = PlainTask(causal().eval(), loss=loss)
        task.eval()
        trainer = treadle.Trainer(max_epochs=1, accumulate_grad_batches=99, **NO_OUTPUT)
        loader = DataLoader(rows, 2, collate_fn=collate_causal)
        trainer.fit(task, loader)
        return task.state_dict(), trainer.validate(task, loader)

    (whole, (validated,)), (expected, (of_texts,)) = map(train_and_validate, ([*texts()[:2], [5], [7]], texts()[:2]))
    assert all(torch.equal(whole[name], value) for name, value in expected.items())
    assert validated["val_loss"] == of_texts["val_loss"]


def evaluated(kind, strategy):
    build, collate = KINDS[kind]
    count = 3 if kind == "classes" else VOCABULARY
    task = TransformersTask(build(), metrics={"accuracy": MulticlassAccuracy(count, average="micro")})
    loader = DataLoader(texts(), 2, collate_fn=collate)
    trainer = treadle.Trainer(strategy=strategy, **NO_OUTPUT)
    (validated,) = trainer.validate(task, loader)
    (tested,) = trainer.test(task, loader)
    return validated, tested


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
@pytest.mark.parametrize("kind", FEW_KINDS)
def test_losses_and_metrics_are_those_of_all_targets_at_once(compute, kind, ranks):
    build, collate = KINDS[kind]
    batch = collate(texts())
    with torch.no_grad():
        outputs = build().eval()(**batch)
    logits, labels = outputs.logits, batch["labels"]
    if kind == "causal":
        logits, labels = logits[:, :-1], labels[:, 1:]
    hits = (logits.argmax(-1) == labels)[labels != -100].double().mean()
    for validated, tested in compute(evaluated, ranks, kind, "ddp" if ranks > 1 else "auto"):
        assert validated["val_loss"] == pytest.approx(float(outputs.loss), rel=1e-5)
        assert validated["val_accuracy"] == pytest.approx(float(hits), rel=1e-5)
        assert tested["test_loss"] == pytest.approx(float(outputs.loss), rel=1e-5)
        assert tested["test_accuracy"] == pytest.approx(float(hits), rel=1e-5)


def word_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(3, VOCABULARY)} | {"[PAD]": 0, "[BOS]": 1, "[EOS]": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]", padding_side="left"
    )


def generated(kind, strategy):
    tokenizer = word_tokenizer()
    generation = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    task = TransformersTask(KINDS[kind][0](), tokenizer=tokenizer, generation=generation)
    prompts = [" ".join(f"w{token}" for token in text[:4]) for text in texts()]
    loader = DataLoader(prompts, 2, collate_fn=lambda rows: dict(tokenizer(rows, return_tensors="pt", padding=True)))
    trainer = treadle.Trainer(strategy=strategy, **NO_OUTPUT)
    return [text for batch in trainer.predict(task, loader) for text in batch]


def test_generated_texts_are_in_the_order_of_the_prompts(compute):
    tokenizer, model = word_tokenizer(), causal().eval()
    expected = []
    for text in texts():
        ids = torch.tensor([text[:4]])
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
        expected.append(tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True))
    assert generated("causal", "auto") == expected
    assert compute(generated, 2, "causal", "ddp") == [expected, expected]


def test_a_model_that_was_loaded_by_name_trains_with_dropout_and_comes_back(tmp_path):
    causal().save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    task = TransformersTask(tmp_path / "model", auto_class="AutoModelForCausalLM")
    assert task.model.training
    assert task.tokenizer.pad_token == "[PAD]"
    trainer = treadle.Trainer(max_epochs=1, default_root_dir=tmp_path, **NO_OUTPUT)
    trainer.fit(task, DataLoader(texts(), 4, collate_fn=collate_causal))
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    again = TransformersTask.load_from_checkpoint(tmp_path / "run.ckpt")
    assert all(map(torch.equal, again.state_dict().values(), task.state_dict().values()))
    task.save_pretrained(tmp_path / "out")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(map(torch.equal, read.state_dict().values(), task.model.state_dict().values()))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "[EOS]"


LORA = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "target_modules": ["c_attn"], "lora_dropout": 0.1}


def fit_adapter(folder, base, epochs, strategy, ckpt_path=None):
    torch.manual_seed(11)
    task = TransformersTask(base, auto_class="AutoModelForCausalLM", adapter=LORA, learning_rate=0.05)
    saved = ModelCheckpoint(folder, "{step}", save_top_k=-1, save_trainable_only=True, enable_version_counter=False)
    flags = {**NO_OUTPUT, "enable_checkpointing": True}
    trainer = treadle.Trainer(max_epochs=epochs, strategy=strategy, callbacks=[saved], **flags)
    treadle.seed_everything(5)
    trainer.fit(task, DataLoader(texts(), 2, shuffle=True, collate_fn=collate_causal), ckpt_path=ckpt_path)
    weights = trainer.accelerator.get_state_dict(task)
    return {name: value.clone() for name, value in weights.items()} if trainer.is_global_zero else {}


def adapt_and_resume(folder, strategy, steps):
    whole = fit_adapter(folder / "whole", folder / "base", 2, strategy)
    # The schedule is as long as the run that it belongs to, so the run is cut by hand.
    return whole, fit_adapter(folder / "cut", folder / "base", 2, strategy, folder / "whole" / f"step={steps}.ckpt")


@pytest.mark.parametrize(("strategy", "ranks"), WORLDS)
def test_adapters_alone_are_saved_and_resume_exactly(compute, strategy, ranks):
    pytest.importorskip("peft")
    folder = compute.folder / f"{strategy}-{ranks}"
    causal(dropout=0.1).save_pretrained(folder / "base")
    (whole, resumed), *_ = compute(adapt_and_resume, ranks, "causal", strategy)
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    names = set(OpenCheckpoint(folder / "whole" / f"step={6 // ranks}.ckpt").open_part("model"))
    assert len(names) == 2
    assert all("lora_" in name for name in names)
    last = folder / "whole" / f"step={12 // ranks}.ckpt"
    task = TransformersTask.load_from_checkpoint(last)
    assert all(torch.equal(value, whole[name]) for name, value in task.state_dict().items())
    causal(seed=9).save_pretrained(folder / "base")
    with pytest.raises(ValueError, match="Build the model from the same pretrained weights"):
        TransformersTask.load_from_checkpoint(last)


def test_messages_name_the_fix(tmp_path):
    with pytest.raises(ValueError, match="needs auto_class, "):
        TransformersTask("somewhere")
    with pytest.raises(ValueError, match="Did you mean 'AutoModelForCausalLM'"):
        TransformersTask("somewhere", auto_class="AutoModelForCausalLm")
    with pytest.raises(ValueError, match="model is a GPT2LMHeadModel"):
        TransformersTask(causal(), auto_class="AutoModelForCausalLM")
    with pytest.raises(ValueError, match="Add 'labels'"):
        TransformersTask(causal()).training_step({"input_ids": torch.ones(1, 4, dtype=torch.long)}, 0)
    frozen = causal().requires_grad_(False)
    with pytest.raises(ValueError, match="requires a gradient"):
        treadle.Trainer(max_epochs=1, **NO_OUTPUT).fit(TransformersTask(frozen), DataLoader(texts(), 4))


def rates(schedule, warmup=0.0, **flags):
    """The learning rate of each step, where it is not 0."""

    class Task(TransformersTask):
        def on_train_batch_start(self, batch, batch_idx):
            seen.append(self.optimizers().param_groups[0]["lr"])

    seen = []
    loaders = [DataLoader(Stream(texts()), 4, collate_fn=collate_causal) for _ in range(2)]
    task = Task(causal(), learning_rate=1.0, lr_scheduler=schedule, warmup_steps=warmup)
    treadle.Trainer(**{"max_epochs": 2, "on_nonfinite": "ignore", **flags, **NO_OUTPUT}).fit(task, *loaders)
    return seen


def test_a_schedule_is_as_long_as_the_run():
    assert rates("linear", max_steps=4, max_epochs=-1) == [1.0, 0.75, 0.5, 0.25]
    assert rates("linear", warmup=0.3, max_steps=4, max_epochs=-1) == [0.0, 0.5, 1.0, 0.5]  # transformers rounds up
    assert rates("constant") == [1.0] * 6
    assert rates("constant_with_warmup", warmup=2) == [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert rates("reduce_lr_on_plateau") == [1.0] * 6
    decaying = [1.0] * 5 + [0.5]  # over the last fifth of the run, rounded up
    assert rates("warmup_stable_decay", max_steps=6, max_epochs=-1) == pytest.approx(decaying)
    for schedule, warmup, words in (
        ("linear", 0, "lr_scheduler='linear' needs the length of the run, which is unknown"),
        ("cosine", 2, "lr_scheduler='cosine' needs the length of the run, which is unknown"),
        ("constant_with_warmup", 0.5, "warmup_steps=0.5 is a fraction of the run, whose length is unknown"),
    ):
        with pytest.raises(ValueError, match=words + r"\. Set Trainer\(max_steps=...\), or"):
            rates(schedule, warmup=warmup)
    with pytest.raises(ValueError, match="Did you mean 'cosine'"):
        rates("cosin")


@pytest.mark.filterwarnings("error::FutureWarning")
def test_recomputed_activations_give_the_same_gradient():
    batch = collate_causal(texts())
    plain, recomputed = (TransformersTask(causal(), gradient_checkpointing=again) for again in (False, True))
    for task in (plain, recomputed):
        task.train()
        task(batch).loss.backward()
    assert recomputed.model.is_activation_checkpointing
    for one, other in zip(plain.parameters(), recomputed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
