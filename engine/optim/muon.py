"""Muon for the hidden matrices of a model, with AdamW for its other parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from ...common.messages import announce, format_count
from ...strategies import repeated_blocks
from ...strategies.distributed import is_sharded, map_whole, strip_compile_prefix

# Embeddings, heads and tables of biases under the names that libraries give them: "wte", "lm_head", "pos_embed" ...
_OTHER = re.compile(r"(^|[._])(\w*embed\w*|wte|wpe|head|classifier|score|\w*bias\w*)(\.|$)")
_OPTIONS = ("weight_decay", "momentum", "nesterov", "ns_coefficients", "ns_steps", "eps", "adjust_lr_fn")


class Muon(torch.optim.Muon):
    """`torch.optim.Muon`, with which processes take turns at matrices that FSDP shards.

    torch's own step is also correct for sharded matrices, but communicates in each of its Newton-Schulz iterations, ten
    times per matrix, and all processes compute the same. Here, the momentum stays sharded. Each update is sent to one
    process, in bfloat16, in which torch computes these iterations, and the result is sent back.

    Source: https://kellerjordan.github.io/posts/muon/
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step. See `torch.optim.Optimizer.step`."""
        from torch.optim._muon import muon

        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            matrices: list[Any] = []
            gradients: list[Any] = []
            buffers: list[Any] = []
            self._init_group(group, matrices, gradients, buffers)
            options = {"lr": group["lr"], "has_complex": False, **{name: group[name] for name in _OPTIONS}}
            plain = [number for number, matrix in enumerate(matrices) if not is_sharded(matrix)]
            muon(*([values[number] for number in plain] for values in (matrices, gradients, buffers)), **options)
            parts = [part for part in zip(matrices, gradients, buffers, strict=True) if is_sharded(part[0])]
            if parts:
                self._step_sharded(parts, options)
        return loss

    def _step_sharded(self, parts: list[tuple[Any, Any, Any]], options: dict[str, Any]) -> None:
        """Take the step of `torch.optim.Muon`, whose results these are bit for bit: the same operations in order."""
        from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

        updates = []
        for _, gradient, buffer in parts:
            buffer.lerp_(gradient, 1 - options["momentum"])
            update = gradient.lerp(buffer, options["momentum"]) if options["nesterov"] else buffer
            updates.append(update.bfloat16())

        def orthogonalize(update: Tensor) -> Tensor:
            return _zeropower_via_newtonschulz(
                update, *(options[name] for name in ("ns_coefficients", "ns_steps", "eps"))
            )

        for (matrix, *_), update in zip(parts, map_whole(orthogonalize, updates, torch.bfloat16), strict=True):
            matrix.mul_(1 - options["lr"] * options["weight_decay"])
            matrix.add_(update, alpha=-_adjust_lr(options["lr"], options["adjust_lr_fn"], matrix.shape))


def muon_with_adamw(
    module: nn.Module,
    lr: float,
    *,
    adamw_lr: float | None = None,
    weight_decay: float = 0.0,
    adamw: Iterable[str] = (),
    muon_options: Mapping[str, Any] | None = None,
    adamw_options: Mapping[str, Any] | None = None,
) -> list[Optimizer]:
    """Return Muon for the hidden matrices of a module, and AdamW for its other trainable parameters, if it has any.

    Return the list from ``configure_optimizers``. AdamW trains embeddings, the head (also if it shares its weight with
    an embedding), biases, norms, convolutions and other parameters that are not matrices. A linear layer is a head if
    it is called ``head``, ``lm_head``, ``classifier`` or ``score``, or if it is outside the repeated blocks and has as
    many outputs as the largest embedding has rows. The split is logged once, on rank zero. With FSDP, Muon's momentum
    is sharded.

    Args:
        module: The task or model, before or after it was sharded.
        lr: Muon's learning rate. By default, Muon scales its updates to the size of AdamW's
            (``adjust_lr_fn="match_rms_adamw"``; Liu et al., 2025, https://arxiv.org/abs/2502.16982), so a learning rate
            for AdamW is suitable.
        adamw_lr: AdamW's learning rate. Default: ``lr``.
        weight_decay: Weight decay of both, except for parameters with fewer than two dimensions. Default: 0.0.
        adamw: Names of further parameters for AdamW, with wildcards, such as ``"*.router.weight"``. For a comparison,
            ``["*"]`` trains all parameters with AdamW.
        muon_options: Further arguments of `torch.optim.Muon`, such as ``{"adjust_lr_fn": "original"}``.
        adamw_options: Further arguments of `torch.optim.AdamW`, such as ``{"betas": (0.9, 0.95)}``.

    Raises:
        ValueError: If the module has no hidden matrix that is trained, or if a name in ``adamw`` matches nothing.

    Examples:
        >>> from torch import nn
        >>> from treadle.optim import muon_with_adamw
        >>> block = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        >>> model = nn.ModuleDict({"wte": nn.Embedding(100, 8), "block": block, "lm_head": nn.Linear(8, 100)})
        >>> muon, adamw = muon_with_adamw(model, lr=1e-3, weight_decay=0.1)
        >>> [tuple(matrix.shape) for matrix in muon.param_groups[0]["params"]]
        [(32, 8), (8, 32)]
    """
    matrices, others = split_parameters(module, patterns := list(adamw))
    if not matrices and not patterns:
        raise ValueError(f"{type(module).__name__} has no hidden matrix that is trained. Use torch.optim.AdamW.")
    announce(f"Muon: {_describe(matrices)}; AdamW: {_describe(others)}")
    options = {"adjust_lr_fn": "match_rms_adamw", **(muon_options or {})}
    optimizers: list[Optimizer] = []
    if matrices:
        optimizers.append(Muon(list(matrices.values()), lr=lr, weight_decay=weight_decay, **options))
    decayed = [parameter for parameter in others.values() if parameter.ndim > 1]
    vectors = [parameter for parameter in others.values() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if groups := [group for group in groups if group["params"]]:
        optimizers.append(AdamW(groups, lr=lr if adamw_lr is None else adamw_lr, **(adamw_options or {})))
    return optimizers


def split_parameters(module: nn.Module, adamw: Iterable[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the hidden matrices of ``module`` that are trained, and its other trained parameters, by name."""
    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    excluded = {part.weight for part in embeddings}
    rows = max((part.num_embeddings for part in embeddings), default=0)
    repeated = {part for block in repeated_blocks(module) for part in block.modules()}
    for part in module.modules():
        getter = getattr(part, "get_output_embeddings", None)  # of transformers' models
        head = part if isinstance(part, nn.Linear) and part.out_features == rows and part not in repeated else None
        head = getter() if callable(getter) else head
        if head is not None:
            excluded.add(head.weight)
    named = {strip_compile_prefix(name): p for name, p in module.named_parameters() if p.requires_grad}
    for pattern in adamw:
        matched = {p for name, p in named.items() if fnmatchcase(name, pattern)}
        if not matched:
            raise ValueError(
                f"adamw={pattern!r} matches no trained parameter. Use names such as {next(iter(named))!r}."
            )
        excluded |= matched
    matrices: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    for name, parameter in named.items():
        is_hidden = (
            parameter.ndim == 2 and parameter not in excluded and not _OTHER.search(name.removesuffix(".weight"))
        )
        (matrices if is_hidden else others)[name] = parameter
    return matrices, others


def _describe(parameters: Mapping[str, Tensor]) -> str:
    """Return the number of parameters and their names, in which ``*`` replaces the numbers of blocks."""
    names = dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name) for name in parameters)
    elements = sum(parameter.numel() for parameter in parameters.values())
    listed = f" ({', '.join(names)})" if names else ""
    return f"{format_count(len(parameters), 'tensor')} with {elements:,} elements{listed}"
