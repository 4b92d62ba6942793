"""`TransformersTask`, a task that wraps a model from Hugging Face transformers."""

from __future__ import annotations

import copy
import inspect
import math
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..common.messages import name_type, nearest
from ..common.optional import require
from ..common.validation import check_bool, choose
from ..engine import evaluation_mode
from ..engine.data.sequences import make_sdpa_mask
from ..engine.optim import chunked_cross_entropy
from ..trainer import TaskModule

if TYPE_CHECKING:
    from peft import PeftConfig
    from torchmetrics import Metric
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

IGNORED = -100
"""Label that transformers' losses ignore."""


_BY_METRIC = ("reduce_lr_on_plateau", "greedy")
# The model returns the inputs of its head for all tokens, and the logits of the last ones only.
_WITHOUT_LOGITS = {"output_hidden_states": True, "logits_to_keep": 1}
_WITHOUT_LENGTH = ("constant", "constant_with_warmup", "inverse_sqrt", *_BY_METRIC)


class TransformersTask(TaskModule):
    """Task for fine-tuning, evaluation and generation with any transformers model whose ``forward`` returns a loss.

    A batch is a dict with the inputs of the model, such as ``input_ids``, ``attention_mask`` and ``labels``. With
    token-level labels, the loss of each batch is weighted by the number of labels in the batch. Padding, accumulation
    and world size therefore do not change the gradients. Causal language models also accept packed rows; see
    `treadle.data.pack`.

    The task logs ``train_loss``, ``val_loss`` and ``test_loss``, and each of ``metrics`` as ``val_NAME`` and
    ``test_NAME``. `Trainer.predict` returns generated texts if ``generation`` is set, otherwise logits.

    Args:
        model: A model, or the name or folder of a model that ``auto_class`` loads with ``from_pretrained``.
        auto_class: Name of the transformers class that loads the model, such as ``"AutoModelForCausalLM"``.
        tokenizer: A tokenizer, or the name or folder of one, for generation. Default: the tokenizer stored with the
            model, if ``model`` is a name or folder.
        learning_rate: AdamW's peak learning rate. Default: 5e-5.
        weight_decay: AdamW's weight decay, for all parameters except biases and norms. Default: 0.0.
        optimizer_options: Further arguments of AdamW, such as ``{"betas": (0.9, 0.95)}``.
        lr_scheduler: A name that ``transformers.get_scheduler`` accepts. Most schedulers advance after each optimizer
            step. ``"reduce_lr_on_plateau"`` and ``"greedy"`` advance after each epoch, based on ``val_loss``. Default:
            ``"linear"``.
        warmup_steps: Length of the warmup in optimizer steps. A value below 1 is a fraction of all steps. Default: 0.
        scheduler_options: Further arguments of the scheduler, such as ``{"num_cycles": 2}``. For
            ``"warmup_stable_decay"``, ``num_decay_steps`` may also be a fraction of all steps; its default is 0.2.
        metrics: torchmetrics objects by name. `update_metrics` updates them in validation and testing.
        generation: Arguments of ``model.generate`` for predictions, such as ``{"max_new_tokens": 50}``.
        adapter: A peft configuration, as an object or a dict. The model's own weights are frozen and adapters are
            trained. ``ModelCheckpoint(save_trainable_only=True)`` saves only the adapters.
        gradient_checkpointing: Whether to recompute activations in the backward pass to save memory. Default: False.
        model_options: Further arguments of ``from_pretrained``, such as ``{"num_labels": 5}``.
        loss: ``"model"`` (default) uses the loss that the model returns. ``"chunked"`` computes the same loss with
            `chunked_cross_entropy`, which needs much less memory for a large vocabulary. The model must be a causal
            language model with a linear head. Evaluation with ``metrics`` needs all logits, so it uses the model's
            loss.

    Raises:
        ModuleNotFoundError: If transformers is not installed, or if ``adapter`` is set and peft is not installed.
        OSError: If the model or the tokenizer cannot be loaded.
        TypeError, ValueError: If an argument is invalid.


    Examples:
        >>> import torch
        >>> import treadle as tl
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from treadle.integrations import TransformersTask
        >>> config = LlamaConfig(
        ...     vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        ... )
        >>> task = TransformersTask(LlamaForCausalLM(config), lr_scheduler="constant")
        >>> tokens = torch.arange(16).reshape(2, 8)
        >>> batches = [{"input_ids": tokens, "labels": tokens}]
        >>> trainer = tl.Trainer(max_steps=1, accelerator="cpu", devices=1, barebones=True)
        >>> trainer.fit(task, batches)
        >>> trainer.global_step
        1
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase | None

    def __init__(
        self,
        model: PreTrainedModel | str | os.PathLike[str],
        *,
        auto_class: str | None = None,
        tokenizer: PreTrainedTokenizerBase | str | os.PathLike[str] | None = None,
        learning_rate: float = 5e-5,
        weight_decay: float = 0.0,
        optimizer_options: Mapping[str, Any] | None = None,
        lr_scheduler: str = "linear",
        warmup_steps: float = 0,
        scheduler_options: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Metric] | None = None,
        generation: Mapping[str, Any] | None = None,
        adapter: PeftConfig | Mapping[str, Any] | None = None,
        gradient_checkpointing: bool = False,
        model_options: Mapping[str, Any] | None = None,
        loss: str = "model",
    ) -> None:
        require("TransformersTask", "transformers", extra="transformers")
        super().__init__()
        named = isinstance(model, str | os.PathLike)
        self.save_hyperparameters(ignore=["metrics", *([] if named else ["model"]), "tokenizer", "adapter"])
        if isinstance(tokenizer, str | os.PathLike):
            self.save_hyperparameters("tokenizer")
        if adapter is not None:
            adapter = _describe_adapter(adapter)
            self.hparams["adapter"] = adapter
        if isinstance(model, str | os.PathLike):
            built = _load_model(model, auto_class, dict(model_options or {}))
        elif auto_class is not None or model_options:
            names = " and ".join(["auto_class"] * (auto_class is not None) + ["model_options"] * bool(model_options))
            raise ValueError(
                f"{names} can only be used with a model's name, but model is {name_type(model)}. Remove {names}."
            )
        else:
            built = model
        self.model = built if adapter is None else _add_adapter(built, adapter)
        self.model.train()  # from_pretrained leaves it in evaluation mode, without dropout
        if check_bool("gradient_checkpointing", gradient_checkpointing):
            # The name in transformers 5; transformers 4 has another one.
            enable = getattr(self.model, "activation_checkpointing_enable", None)
            (enable or self.model.gradient_checkpointing_enable)({"use_reentrant": False})
        self._needs_mask: bool | None = None  # None until there is a packed row
        self._is_chunked = choose("loss", loss, ("model", "chunked")) == "chunked"
        if self._is_chunked:
            _check_head(self.model)
        self.tokenizer = _load_tokenizer(tokenizer, model if named else None)
        metrics = dict(metrics or {})
        self.val_metrics = nn.ModuleDict(metrics)
        self.test_metrics = nn.ModuleDict({name: copy.deepcopy(metric) for name, metric in metrics.items()})

    # -- steps ---------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model and return its output. A single positional mapping is unpacked into keyword arguments."""
        if len(args) == 1 and not kwargs and isinstance(args[0], Mapping):
            kwargs, args = {**args[0]}, ()
            # transformers finds the documents of a packed row by their position ids only if it creates no cache;
            # otherwise tokens attend to other documents.
            if "position_ids" in kwargs and _predicts_next_token(self.model):
                kwargs.setdefault("use_cache", False)
                self._separate_documents(kwargs)
        return self.model(*args, **kwargs)

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> dict[str, Any]:
        """Return the loss and, with token-level labels, the result of `count_targets` as ``"weight"``."""
        weight = self.count_targets(batch)
        loss = self._get_loss(None if self._is_chunked else self(batch), batch, weight)
        self.log("train_loss", loss, prog_bar=True)
        return {"loss": loss} if weight is None else {"loss": loss, "weight": weight}

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log ``val_loss`` and the metrics."""
        self._evaluate(batch, "val", self.val_metrics)

    def test_step(self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log ``test_loss`` and the metrics."""
        self._evaluate(batch, "test", self.test_metrics)

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Return a list of generated texts, or the logits if ``generation`` is not set. ``labels`` are ignored."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        if self.hparams.generation is None:
            return self(inputs).logits
        # If the model is sharded, a rank that is done must participate in the other ranks' calls.
        together = self.trainer.accelerator.strategy.sharded and self.trainer.world_size > 1
        tokens = self.model.generate(**inputs, **self.hparams.generation, synced_gpus=together)
        if self.tokenizer is None:
            raise ValueError(
                "generation={...} needs a tokenizer to decode the generated tokens. Pass tokenizer=... to the task."
            )
        if not self.model.config.is_encoder_decoder:  # decoder-only models return the prompt too
            tokens = tokens[:, inputs["input_ids"].shape[1] :]
        return self.tokenizer.batch_decode(tokens, skip_special_tokens=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return an AdamW optimizer and its learning rate schedule.

        Raises:
            ValueError: If no parameter is trainable, an option is invalid, or the schedule needs the length of the run
                but the length is unknown.
        """
        options = self.hparams
        decayed: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for parameter, decays in self._iterate_trained():
            (decayed if decays else others).append(parameter)
        groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        if not groups:
            raise ValueError("no parameter of the model requires a gradient. Unfreeze at least one parameter.")
        optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, **dict(options.optimizer_options or {}))
        return {"optimizer": optimizer, "lr_scheduler": self._make_scheduler(optimizer)}

    # -- methods that may be overridden --------------------------------------------------------------------------

    def count_targets(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return the number of labels over which the loss of a batch is averaged.

        Args:
            batch: Keyword arguments of the model, such as ``input_ids`` and ``labels``.

        Returns:
            A 0-d tensor; None if the batch has no token-level labels.
        """
        labels = self._select_targets(batch)
        return None if labels is None else (labels != IGNORED).sum()

    def update_metrics(self, metrics: nn.ModuleDict, logits: Tensor, batch: Mapping[str, Any]) -> None:
        """Update the metrics with the logits and labels of a batch.

        With token-level labels, only the tokens that have a label are used. Override this method for metrics with other
        inputs.

        Args:
            metrics: torchmetrics objects by name.
            logits: Tensor of shape ``[samples, classes]`` or ``[samples, tokens, classes]``.
            batch: Keyword arguments of the model.
        """
        targets = self._select_targets(batch)
        if targets is None:
            targets = batch["labels"]
            predictions = logits.squeeze(-1) if logits.ndim > targets.ndim and logits.shape[-1] == 1 else logits
        else:
            has_label = targets != IGNORED
            predictions, targets = logits[:, : targets.shape[1]][has_label], targets[has_label]
        metric: Any
        for metric in metrics.values():
            metric.update(predictions, targets)

    # -- methods to call -----------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Save the model (or only its adapters, if it has any) and the tokenizer in the format of ``from_pretrained``.

        Must be called on all ranks.

        Args:
            folder: Path of the folder, which is created if it is missing.
        """
        if self._trainer is None:
            weights, writes = self.state_dict(), True
        else:
            accelerator = self.trainer.accelerator
            weights, writes = accelerator.get_state_dict(self), accelerator.is_main_process
        if writes:
            inside = {name.removeprefix("model."): w for name, w in weights.items() if name.startswith("model.")}
            self.model.save_pretrained(folder, state_dict=inside)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(folder)

    # -- inside --------------------------------------------------------------------------------------------------

    def _evaluate(self, batch: Mapping[str, Any], stage: str, metrics: nn.ModuleDict) -> None:
        outputs: Any = None if self._is_chunked and not metrics else self(batch)
        count = self.count_targets(batch)
        weight = None if count is None else int(count)  # one synchronization per batch; training has none
        self.log(f"{stage}_loss", self._get_loss(outputs, batch, count), prog_bar=True, batch_size=weight)
        if metrics:
            self.update_metrics(metrics, outputs.logits, batch)
            self.log_dict({f"{stage}_{name}": metric for name, metric in metrics.items()}, on_step=False, on_epoch=True)

    def _get_loss(self, outputs: Any, batch: Mapping[str, Any], count: Tensor | None) -> Tensor:
        """Return the loss of a batch, or 0 if the batch has token labels and all of them are ignored.

        If ``outputs`` is None, the loss is computed in chunks.
        """
        if outputs is None:
            return self._get_chunked_loss(batch)
        loss: Tensor | None = getattr(outputs, "loss", None)
        if loss is None:
            fix = "Use a model class that computes a loss" if "labels" in batch else "Add 'labels' to the batch"
            raise ValueError(
                f"{type(self.model).__name__} returned no loss for a batch with {', '.join(map(repr, batch))}. {fix}."
            )
        # The mean of a batch whose labels are all ignored is NaN.
        return loss if count is None else torch.where(count > 0, loss, torch.zeros_like(loss))

    def _get_chunked_loss(self, batch: Mapping[str, Any]) -> Tensor:
        targets = self._select_targets(batch)
        if targets is None:
            raise ValueError("loss='chunked' needs 'input_ids' and 'labels' with a label per token in each batch.")
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        hidden = self({**inputs, **_WITHOUT_LOGITS}).hidden_states[-1]
        total = chunked_cross_entropy(
            hidden[:, : targets.shape[1]], self.model.get_output_embeddings(), targets, reduction="sum"
        )
        return total / (targets != IGNORED).sum().clamp(min=1)

    def _separate_documents(self, batch: dict[str, Any]) -> None:
        """Add a mask to a batch of packed rows if the model needs one to treat each document as if it were alone."""
        implementation = getattr(self.model.config, "_attn_implementation", None) or ""
        # transformers' `_is_packed_sequence`, up to version 5.23
        if "flash" in implementation and "seq_idx" in batch and len(batch["seq_idx"]) > 1:
            raise ValueError(
                f"a batch has {len(batch['seq_idx'])} packed rows, but with attn_implementation={implementation!r}, "
                "transformers separates their documents only if a batch is a single row. Use batch_size=1 and longer "
                "rows, or attn_implementation='sdpa' or 'flex_attention'."
            )
        if "attention_mask" in batch or "input_ids" not in batch:
            return
        if self._needs_mask is None:
            starts = batch["position_ids"] == 0
            if type(starts) is not Tensor or torch.compiler.is_compiling():
                return  # values can't be read, such as those of the fake tensors of a plan
            packed = "seq_idx" in batch or bool(starts.sum() > len(starts))
            self._needs_mask = packed and _needs_mask(self.model, starts.device, implementation)
        if self._needs_mask:
            documents = batch["seq_idx"] if "seq_idx" in batch else (batch["position_ids"] == 0).cumsum(-1)
            batch["attention_mask"] = make_sdpa_mask(documents)

    def _select_targets(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return the token labels that the loss uses, or None if the batch has no labels for tokens."""
        labels = batch.get("labels")
        if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.is_floating_point() or "input_ids" not in batch:
            return None
        return labels[:, 1:] if _predicts_next_token(self.model) else labels

    def _make_scheduler(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        from transformers import SchedulerType, get_scheduler

        options = self.hparams
        name = choose("lr_scheduler", options.lr_scheduler, [kind.value for kind in SchedulerType])
        steps, warmup = self.trainer.estimated_stepping_batches, options.warmup_steps
        has_length, extra = math.isfinite(steps), dict(options.scheduler_options or {})
        if not has_length and 0 < warmup < 1:
            raise ValueError(
                f"warmup_steps={warmup} is a fraction of the run, whose length is unknown. Set Trainer(max_steps=...), "
                "or pass an integer."
            )
        if name == "warmup_stable_decay" and 0 < (decay := extra.setdefault("num_decay_steps", 0.2)) < 1 and has_length:
            extra["num_decay_steps"] = math.ceil(decay * steps)
        if not has_length and name not in _WITHOUT_LENGTH and "num_stable_steps" not in extra:
            raise ValueError(
                f"lr_scheduler={name!r} needs the length of the run, which is unknown. Set Trainer(max_steps=...), or "
                "use 'constant' or 'constant_with_warmup'."
            )
        scheduler = get_scheduler(
            name,
            optimizer,
            num_warmup_steps=math.ceil(warmup * steps) if 0 < warmup < 1 else int(warmup),
            num_training_steps=int(steps) if has_length else None,
            scheduler_specific_kwargs=extra,
        )
        if name in _BY_METRIC:
            return {"scheduler": scheduler, "monitor": "val_loss", "reduce_on_plateau": True}
        return {"scheduler": scheduler, "interval": "step"}

    def _iterate_trained(self) -> Iterator[tuple[nn.Parameter, bool]]:
        visited = set()
        for part in self.modules():
            is_norm = "norm" in type(part).__name__.lower()
            for name, parameter in part.named_parameters(recurse=False):
                if parameter.requires_grad and id(parameter) not in visited:
                    visited.add(id(parameter))
                    yield parameter, not (is_norm or name == "bias")


def _predicts_next_token(model: Any) -> bool:
    """Return whether the loss compares the logits of each token with the next label (causal language model)."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model = getattr(model, "base_model", model).model if hasattr(model, "peft_config") else model
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    known = {name for entry in names for name in (entry if isinstance(entry, tuple) else (entry,))}
    causal = getattr(model, "loss_type", None) == "ForCausalLM" or any(c.__name__ in known for c in type(model).__mro__)
    return causal and not model.config.is_encoder_decoder


def _needs_mask(model: Any, device: torch.device, implementation: str) -> bool:
    """Return whether a model separates the documents of packed rows only if it gets a mask.

    Not every model of transformers derives its mask from the position ids (up to version 5.23: OPT and BioGPT do not),
    and some can't separate documents at all (BLOOM, Mamba). The model's results for a document are compared with those
    after another document, and with those of the document alone.

    Raises:
        ValueError: If the documents are not separate with a mask either.
    """
    count = model.get_input_embeddings().num_embeddings
    first, other, document = (torch.arange(n, n + 3, device=device)[None] % count for n in (1, 4, 7))
    positions = torch.arange(6, device=device)[None] % 3
    seq_idx = (torch.arange(6, device=device)[None] // 3).int()

    def predict(*documents: Tensor, **inputs: Tensor) -> Tensor:
        return model(input_ids=torch.cat(documents, 1), use_cache=False, **inputs).logits[:, -3:]

    with torch.no_grad(), evaluation_mode(model), torch.compiler.set_stance("force_eager"):
        alone = predict(document)
        limit = alone.abs().max() * max(3e-4, 4 * torch.finfo(alone.dtype).eps)
        for mask in [{}, {"attention_mask": make_sdpa_mask(seq_idx)}][: 1 + (implementation == "sdpa")]:
            inputs = {"position_ids": positions, "seq_idx": seq_idx, **mask}
            packed, replaced = (predict(before, document, **inputs) for before in (first, other))
            if (packed - replaced).abs().max() <= limit and (packed - alone).abs().max() <= 0.1 * alone.abs().max():
                return bool(mask)
    raise ValueError(
        f"a batch has packed rows, but with attn_implementation={implementation!r}, the results of "
        f"{type(model).__name__} for a document depend on the other documents in its row. Use "
        "attn_implementation='sdpa' if the model has it, or rows with one document each, batched by BudgetBatchSampler."
    )


def _check_head(model: Any) -> None:
    """Raise an error unless the model's loss is the cross-entropy of a linear head on the last hidden states."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    if reason := _explain_head(model, base):
        raise ValueError(
            f"loss='chunked' can't replace the loss of {type(base).__name__}, which {reason}. Use loss='model'."
        )


def _explain_head(model: Any, base: Any) -> str:
    """Return why the loss is not the cross-entropy of a linear head on the last hidden states; otherwise ``""``.

    The model runs with two tokens and random numbers in place of the head's results. Large numbers show what is done
    with logits, such as a limit, also in a model that was not trained yet.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not _predicts_next_token(model) or "logits_to_keep" not in inspect.signature(base.forward).parameters:
        return "is not a causal language model with the argument logits_to_keep"
    if not isinstance(head, nn.Linear):
        return f"has {type(head).__module__}.{type(head).__qualname__} as its head, not nn.Linear"
    if any(parameter.is_meta for parameter in model.parameters()):
        return ""
    seen: list[Tensor] = []

    def replace(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen[:] = inputs[0], torch.linspace(-99, 99, output.numel()).reshape(output.shape).to(output)
        return seen[1]

    tokens = torch.zeros(1, 2, dtype=torch.int64, device=head.weight.device)
    with head.register_forward_hook(replace), torch.no_grad(), evaluation_mode(model):
        outputs = model(input_ids=tokens, **_WITHOUT_LOGITS)
        if not (torch.equal(outputs.hidden_states[-1][:, -1:], seen[0]) and torch.equal(outputs.logits, seen[1])):
            return "computes more than the head's product from the last hidden state"
        loss = model(input_ids=tokens, labels=tokens).loss.float()
        expected_loss = nn.functional.cross_entropy(seen[1][0, :1].float(), tokens[0, :1])
    return "" if torch.allclose(loss, expected_loss) else "adds to the cross-entropy of its logits"


def _load_model(name: str | os.PathLike[str], auto_class: str | None, options: dict[str, Any]) -> Any:
    import transformers

    known = [name for name in dir(transformers) if name.startswith("AutoModelFor")]
    if auto_class is None:
        raise ValueError(
            f"model={str(name)!r} needs auto_class, the name of the class that loads the model. Set auto_class, for "
            "example to 'AutoModelForCausalLM', 'AutoModelForSequenceClassification' or 'AutoModelForSeq2SeqLM'."
        )
    if auto_class not in known:
        raise ValueError(
            f"auto_class={auto_class!r} must be the name of an AutoModelFor... class from transformers, such as "
            f"'AutoModelForCausalLM'.{nearest(auto_class, known)}"
        )
    return getattr(transformers, auto_class).from_pretrained(name, **options)


def _load_tokenizer(tokenizer: Any, model: Any) -> Any:
    from transformers import AutoTokenizer

    if isinstance(tokenizer, str | os.PathLike):
        return AutoTokenizer.from_pretrained(tokenizer)
    if tokenizer is not None or model is None:
        return tokenizer
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError):  # the model has no tokenizer
        return None


def _describe_adapter(adapter: Any) -> dict[str, Any]:
    """Return a peft configuration as plain data for checkpoints."""
    values = dict(adapter) if isinstance(adapter, Mapping) else adapter.to_dict()
    if "peft_type" not in values:
        raise ValueError("adapter={...} has no 'peft_type'. Add 'peft_type': 'LORA', or pass a LoraConfig(...).")
    plain = {
        name: sorted(v) if isinstance(v, set | frozenset) else getattr(v, "value", v) for name, v in values.items()
    }
    return plain


def _add_adapter(model: Any, adapter: dict[str, Any]) -> Any:
    require("TransformersTask(adapter=...)", "peft", extra="transformers")
    from peft import PeftConfig, get_peft_model

    return get_peft_model(model, PeftConfig.from_peft_type(**adapter))
