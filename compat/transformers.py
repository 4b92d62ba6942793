"""Transformers' ``TrainingArguments`` translated to Treadle's arguments."""

from __future__ import annotations

import math
from dataclasses import MISSING
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from ..callbacks import BatchSizeFinder, ModelCheckpoint
from ..common.messages import announce, join_words, warn
from ..loggers import (
    ClearMLLogger,
    CometLogger,
    CSVLogger,
    Logger,
    MLFlowLogger,
    SwanLabLogger,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
)
from ..strategies import DDP, FSDP

__all__ = ["loader_arguments", "task_arguments", "training_arguments"]

_BY_THE_SCRIPT = (
    *("do_train", "do_eval", "do_predict", "resume_from_checkpoint", "seed", "data_seed", "local_rank"),
    *("load_best_model_at_end", "label_names", "remove_unused_columns", "train_sampling_strategy"),
    *("per_device_train_batch_size", "per_device_eval_batch_size", "dataloader_drop_last", "dataloader_num_workers"),
    *("dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_in_order"),
    *("dataloader_multiprocessing_context", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs"),
    *("warmup_steps", "warmup_ratio", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim"),
    *("gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing"),
    *("activation_checkpointing_kwargs",),
)
"""Fields that the script, the dataloaders or the task use, not the Trainer."""

_WITHOUT_EFFECT = (
    *("log_level", "log_level_replica", "log_on_each_node", "logging_nan_inf_filter", "logging_first_step"),
    *("skip_memory_metrics", "prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object"),
    *("eval_accumulation_steps", "average_tokens_across_devices", "ddp_backend"),
    *("trackio_static_space_id", "restore_callback_states_from_checkpoint"),
    *("include_for_metrics", "batch_eval_metrics", "include_num_input_tokens_seen", "use_cache", "save_on_each_node"),
    *("hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"),
    *("enable_jit_checkpoint", "length_column_name"),
)
"""Fields without effect: metrics are exact over all tokens and ranks, and checkpoints are always complete."""

_REFUSED = {
    "push_to_hub": "call task.save_pretrained(folder) after fit, and upload the folder",
    "deepspeed": "use Trainer(strategy='fsdp')",
    "parallelism_config": "use Trainer(strategy=FSDP(tensor_parallel_size=...))",
    "torch_empty_cache_steps": "call torch.cuda.empty_cache() in a callback",
    "ignore_data_skip": "remove it, because a resumed run always continues with the next batch",
    "group_by_length": "pass the DataLoader a batch sampler that groups by length",
    "label_smoothing_factor": "override training_step of the task",
    "neftune_noise_alpha": "add the noise in a forward hook of the embeddings",
    "use_liger_kernel": "apply Liger's kernels to the model before you pass it to the task",
    "liger_kernel_config": "apply Liger's kernels to the model before you pass it to the task",
    "bf16_full_eval": "validate with a separate Trainer(precision='bf16-true')",
    "fp16_full_eval": "validate with a separate Trainer(precision='16-true')",
    "eval_delay": "use Trainer(check_val_every_n_epoch=...)",
    "debug": "use Trainer(detect_anomaly=True)",
    "optim_args": "override configure_optimizers of the task",
    "optim_target_modules": "override configure_optimizers of the task",
}
"""Fields that raise an error unless they have their default value, with their replacements."""

_DEFAULT_TIMEOUT = 1800  # seconds

_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")  # fused kernels are used wherever possible

_LOGGERS: dict[str, Any] = {
    **{"tensorboard": TensorBoardLogger, "wandb": WandbLogger, "mlflow": MLFlowLogger},
    **{"clearml": ClearMLLogger, "comet_ml": CometLogger, "swanlab": SwanLabLogger, "trackio": TrackioLogger},
}


def training_arguments(args: Any) -> dict[str, Any]:
    """Return the arguments of the `Trainer` that corresponds to ``TrainingArguments``.

    Call ``seed_everything(args.seed)`` first, and pass ``args.resume_from_checkpoint`` to ``fit`` as ``ckpt_path``. A
    table of all fields is in ``docs/from_hf_trainer.md``.

    Args:
        args: A ``transformers.TrainingArguments``.

    Raises:
        ValueError: If a field has a value that cannot be translated. The error names the field and states a fix.
    """
    _refuse(args)
    interval = _count_accumulated(args)
    return {
        "default_root_dir": args.output_dir,
        **_translate_length(args),
        "accumulate_grad_batches": interval,
        "gradient_clip_val": args.max_grad_norm or None,
        "precision": "bf16-mixed" if args.bf16 else "16-mixed" if args.fp16 else "32-true",
        "float32_matmul_precision": "high" if args.tf32 else None,
        "accelerator": "cpu" if args.use_cpu else "auto",
        "strategy": _translate_strategy(args),
        "deterministic": bool(args.full_determinism),
        "compile": _translate_compile(args),
        "enable_progress_bar": not args.disable_tqdm,
        "log_every_n_steps": 0 if _read(args, "logging_strategy") == "no" else _read_steps(args, "logging_steps"),
        "logger": _make_loggers(args),
        "timeout": None if args.ddp_timeout == _DEFAULT_TIMEOUT else timedelta(seconds=args.ddp_timeout),
        **_translate_evaluation(args, interval),
        **_translate_saving(args),
    }


def loader_arguments(args: Any, training: bool = True) -> dict[str, Any]:
    """Return the arguments of a ``DataLoader`` that ``TrainingArguments`` contain.

    Args:
        args: A ``transformers.TrainingArguments``.
        training: Whether the dataloader is for training instead of evaluation. Default: True.
    """
    workers = args.dataloader_num_workers
    return {
        "batch_size": args.per_device_train_batch_size if training else args.per_device_eval_batch_size,
        "shuffle": training and _read(args, "train_sampling_strategy") in (None, "random"),
        "drop_last": args.dataloader_drop_last and training,
        "num_workers": workers,
        "pin_memory": args.dataloader_pin_memory and torch.cuda.is_available(),
        "persistent_workers": args.dataloader_persistent_workers,
        "prefetch_factor": args.dataloader_prefetch_factor if workers else None,
        "multiprocessing_context": getattr(args, "dataloader_multiprocessing_context", None) if workers else None,
        "in_order": getattr(args, "dataloader_in_order", True),
    }


def task_arguments(args: Any) -> dict[str, Any]:
    """Return the arguments of a `TransformersTask` that ``TrainingArguments`` contain.

    Args:
        args: A ``transformers.TrainingArguments``.

    Raises:
        ValueError: If ``args.optim`` is not torch's AdamW.
    """
    if _read(args, "optim") not in _OPTIMIZERS:
        raise ValueError(
            f"optim={_read(args, 'optim')!r} must be {join_words(list(map(repr, _OPTIMIZERS)))}, because "
            "TransformersTask uses AdamW. For another optimizer, set optim='adamw_torch' and override "
            "configure_optimizers of the task."
        )
    warmup = args.warmup_steps or getattr(args, "warmup_ratio", None) or 0
    recompute = args.gradient_checkpointing or getattr(args, "activation_checkpointing", None)
    return {
        "learning_rate": args.learning_rate,
        "weight_decay": args.weight_decay,
        "optimizer_options": {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon},
        "lr_scheduler": _read(args, "lr_scheduler_type"),
        "scheduler_options": dict(args.lr_scheduler_kwargs or {}),
        "warmup_steps": warmup,
        "gradient_checkpointing": bool(recompute),
    }


def _read(args: Any, name: str) -> Any:
    """Return the value of a field, or None if it is missing. A member of an enum is replaced by its value."""
    value = getattr(args, name, None)
    return getattr(value, "value", value)


def _refuse(args: Any) -> None:
    defaults = {name: field.default for name, field in getattr(type(args), "__dataclass_fields__", {}).items()}
    lines = []
    for name, fix in _REFUSED.items():
        value, default = _read(args, name), defaults.get(name)
        if value not in (None, default, "", [], False, 0, 0.0):
            lines.append(f"{name}={value!r}: {fix}")
    if _read(args, "train_sampling_strategy") == "group_by_length":
        lines.append(f"train_sampling_strategy='group_by_length': {_REFUSED['group_by_length']}")
    if getattr(args.accelerator_config, "split_batches", False):
        lines.append("accelerator_config.split_batches=True: set the batch size per process in the DataLoader")
    if _read(args, "logging_strategy") == "epoch":
        lines.append("logging_strategy='epoch': log with on_step=False, on_epoch=True in the task")
    if lines:
        raise ValueError(
            "these TrainingArguments have no direct equivalent in Treadle. Leave them at their defaults, and replace "
            "them as follows:\n  " + "\n  ".join(lines)
        )
    changed = [name for name, default in defaults.items() if default is not MISSING and _read(args, name) != default]
    if idle := [name for name in changed if name in _WITHOUT_EFFECT]:
        announce(f"these TrainingArguments have no effect in Treadle: {', '.join(idle)}. See docs/from_hf_trainer.md.")
    known = {*_BY_THE_SCRIPT, *_WITHOUT_EFFECT, *_REFUSED, *_TRANSLATED}
    if newer := [name for name in changed if name not in known]:
        warn(
            "this version of Treadle does not support these TrainingArguments, so they are ignored: "
            f"{', '.join(newer)}. See docs/from_hf_trainer.md."
        )


_TRANSLATED = (
    *("output_dir", "num_train_epochs", "max_steps", "gradient_accumulation_steps", "max_grad_norm", "bf16", "fp16"),
    *("tf32", "use_cpu", "full_determinism", "torch_compile", "torch_compile_backend", "torch_compile_mode"),
    *("disable_tqdm", "logging_strategy", "logging_steps", "report_to", "run_name", "eval_strategy", "eval_steps"),
    *("eval_on_start", "save_strategy", "save_steps", "save_total_limit", "save_only_model", "metric_for_best_model"),
    *("greater_is_better", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
    *("ddp_static_graph", "ddp_timeout", "fsdp", "fsdp_config", "auto_find_batch_size", "accelerator_config"),
    *("project", "trackio_space_id", "trackio_bucket_id"),
)
"""Fields that `training_arguments` translates."""


def _count_accumulated(args: Any) -> int:
    return int(args.gradient_accumulation_steps)


def _read_steps(args: Any, name: str) -> int:
    """Return a field that is a number of optimizer steps."""
    value = getattr(args, name)
    if not 0 < value < math.inf or value != int(value):
        raise ValueError(
            f"{name}={value!r} must be a whole number of optimizer steps, at least 1. A fraction of the run is not "
            "supported. Pass the number of steps."
        )
    return int(value)


def _translate_length(args: Any) -> dict[str, Any]:
    if args.max_steps > 0:
        return {"max_steps": args.max_steps}
    epochs = args.num_train_epochs
    if epochs == int(epochs):
        return {"max_epochs": int(epochs)}
    if epochs < 1:
        return {"max_epochs": 1, "limit_train_batches": float(epochs)}
    raise ValueError(
        f"num_train_epochs={epochs} must be a whole number, or a fraction below 1. Round it, or set max_steps."
    )


def _translate_strategy(args: Any) -> Any:
    words = args.fsdp
    if words:
        words = "full_shard" if words is True else words if isinstance(words, str) else " ".join(map(str, words))
        reshard = "shard_grad_op" not in words and bool((args.fsdp_config or {}).get("reshard_after_forward", True))
        return FSDP(reshard_after_forward=reshard, cpu_offload="offload" in words)
    options = {
        name: value
        for name in ("find_unused_parameters", "bucket_cap_mb", "broadcast_buffers", "static_graph")
        if (value := getattr(args, f"ddp_{name}", None)) is not None
    }
    return DDP(**options) if options else "auto"


def _translate_compile(args: Any) -> bool | dict[str, Any]:
    if not (args.torch_compile or args.torch_compile_backend or args.torch_compile_mode):
        return False
    options = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
    return {name: value for name, value in options.items() if value} or True


def _make_loggers(args: Any) -> list[Logger]:
    names = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or ())
    names = [name for name in names if name != "none"]
    if unknown := [name for name in names if name not in _LOGGERS]:
        raise ValueError(
            f"report_to={unknown} is not supported. Use {join_words([*map(repr, _LOGGERS), repr('none')])}. For "
            "another service, write a Logger and pass it to the Trainer. See docs/loggers.md."
        )
    loggers: list[Logger] = [_LOGGERS[name](**_logger_options(name, args)) for name in names]
    return loggers or [CSVLogger(args.output_dir)]  # its history was in trainer_state.json


def _logger_options(name: str, args: Any) -> dict[str, Any]:
    run_name = args.run_name
    if name == "mlflow":
        return {"save_dir": Path(args.output_dir) / "mlruns", "run_name": run_name}
    if name == "clearml":
        return {"task_name": run_name}
    if name == "comet_ml":
        return {"name": run_name} if run_name else {}
    if name == "swanlab":
        return {"save_dir": args.output_dir, "experiment_name": run_name}
    if name == "trackio":
        places = {"space_id": _read(args, "trackio_space_id"), "bucket_id": _read(args, "trackio_bucket_id")}
        places = {place: value for place, value in places.items() if value}
        return {"project": _read(args, "project") or "huggingface", "name": run_name, **places}
    return {"save_dir": args.output_dir, "name": run_name or "treadle_logs"}


def _translate_evaluation(args: Any, interval: int) -> dict[str, Any]:
    sanity = {"num_sanity_val_steps": -1 if args.eval_on_start else 0}
    when = _read(args, "eval_strategy")
    if when == "no":
        return {**sanity, "limit_val_batches": 0}
    if when == "epoch":
        return sanity
    steps = _read_steps(args, "eval_steps" if args.eval_steps else "logging_steps")
    return {**sanity, "val_check_interval": steps * interval, "check_val_every_n_epoch": None}


def _translate_saving(args: Any) -> dict[str, Any]:
    callbacks: list[Any] = [BatchSizeFinder()] if args.auto_find_batch_size else []
    when = _read(args, "save_strategy")
    if when == "no":
        return {"enable_checkpointing": False, "callbacks": callbacks}
    name = args.metric_for_best_model
    monitor, mode = None, "min"
    if name is not None:
        monitor = f"val_{name.removeprefix('eval_')}"
        greater = args.greater_is_better if args.greater_is_better is not None else not name.endswith("loss")
        mode = "max" if greater else "min"
    keep = -1 if args.save_total_limit is None else max(int(args.save_total_limit), 1)
    if monitor is None and keep > 1:
        monitor, mode = "step", "max"  # the newest one
    trigger: dict[str, Any] = (
        {"every_n_train_steps": _read_steps(args, "save_steps")} if when == "steps" else {"every_n_epochs": 1}
    )
    saved = ModelCheckpoint(
        Path(args.output_dir) / "checkpoints",
        monitor=monitor,
        mode=mode,
        save_top_k=1 if when == "best" else keep,
        save_last=True if monitor is not None and monitor != "step" else None,
        save_weights_only=args.save_only_model,
        **trigger,
    )
    return {"callbacks": [saved, *callbacks]}
