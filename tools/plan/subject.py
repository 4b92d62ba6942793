"""Subject of a plan: a run that a configuration describes, or a Llama decoder that is selected by name."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from ...common.validation import choose
from ...strategies import Strategy
from . import simulated_world
from .report import Schedule
from .strategy_facts import varied

if TYPE_CHECKING:
    from .plan import Plan


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Dimensions of a decoder.

    Args:
        width: Number of features per token.
        layers: Number of transformer blocks.
        heads: Number of attention heads.
        key_heads: Number of key heads, and of value heads.
        hidden: Number of hidden features of the feed-forward layer.
        vocabulary: Number of tokens in the vocabulary.
        length: Number of input tokens per sample.
    """

    width: int
    layers: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int
    length: int


MODELS = {
    "gpt-162m": Sizes(width=768, layers=12, heads=12, key_heads=12, hidden=2048, vocabulary=50304, length=1024),
    "llama-1b": Sizes(width=2048, layers=16, heads=32, key_heads=8, hidden=8192, vocabulary=128256, length=8192),
    "llama-7b": Sizes(width=4096, layers=32, heads=32, key_heads=32, hidden=11008, vocabulary=32000, length=4096),
    "llama-8b": Sizes(width=4096, layers=32, heads=32, key_heads=8, hidden=14336, vocabulary=128256, length=8192),
    "llama-70b": Sizes(width=8192, layers=80, heads=64, key_heads=8, hidden=28672, vocabulary=128256, length=8192),
    "llama-405b": Sizes(width=16384, layers=126, heads=128, key_heads=8, hidden=53248, vocabulary=128256, length=8192),
}


def sizes_of(name: str) -> Sizes:
    """Return the dimensions of a model by name, such as ``llama-7b`` or, for short, ``7b``."""
    short = {full.partition("-")[2]: full for full in MODELS}
    chosen = choose("model", name.lower(), [*MODELS, *short])
    return MODELS[short.get(chosen, chosen)]


class Attention(nn.Module):
    """Causal self-attention with rotary position embeddings and grouped key and value heads."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.width // sizes.heads
        self.queries = nn.Linear(sizes.width, sizes.heads * self.head, bias=False)
        self.keys = nn.Linear(sizes.width, sizes.key_heads * self.head, bias=False)
        self.values = nn.Linear(sizes.width, sizes.key_heads * self.head, bias=False)
        self.out = nn.Linear(sizes.heads * self.head, sizes.width, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """Apply attention to ``x`` of shape (batch, length, width).

        ``turn`` contains the cosines and sines of the rotary position embeddings; see `rotate`.
        """
        batch, length, _ = x.shape
        q, k, v = (part(x).view(batch, length, -1, self.head) for part in (self.queries, self.keys, self.values))
        q, k = rotate(q, turn), rotate(k, turn)
        times = q.shape[2] // k.shape[2]
        if times > 1:
            k, v = (part.repeat_interleave(times, dim=2) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate pairs of features of ``x``, of shape (batch, length, heads, features).

    ``turn`` contains the cosines and sines of the angles, and has the shape (2, length, 1, features / 2). Each feature
    of the first half forms a pair with one of the second half.
    """
    first, second = x.float().chunk(2, dim=-1)
    cosine, sine = turn.unbind(0)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1).type_as(x)


class FeedForward(nn.Module):
    """SwiGLU feed-forward layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to features of shape (batch, length, width)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Transformer block of attention and a feed-forward layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.width)
        self.attention = Attention(sizes)
        self.feed_norm = nn.RMSNorm(sizes.width)
        self.feed = FeedForward(sizes)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """Apply attention and then the feed-forward layer."""
        x = x + self.attention(self.attention_norm(x), turn)
        return x + self.feed(self.feed_norm(x))


class Decoder(nn.Module):
    """Language model that maps tokens to the logits of the next tokens."""

    turn: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.scores = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        half = sizes.width // sizes.heads // 2
        angles = torch.outer(torch.arange(sizes.length).float(), 1.0 / 500000.0 ** (torch.arange(half).float() / half))
        self.register_buffer("turn", torch.stack([angles.cos(), angles.sin()])[:, :, None, :], persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits, of shape (batch, length, vocabulary), for token indices of shape (batch, length)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.turn[:, : tokens.shape[1]])
        return self.scores(self.norm(x))  # type: ignore[no-any-return]


def next_token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next tokens, for token indices of shape (batch, length + 1)."""
    scores = model(batch[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1).float(), batch[:, 1:].flatten(0, 1))


def tokens(sizes: Sizes, samples: int) -> Tensor:
    """Return a batch of zeros as token indices, of shape (samples, length + 1)."""
    return torch.zeros(samples, sizes.length + 1, dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Functions and settings that describe a run to `simulate`.

    Attributes:
        build_model: Function that builds the model, called with the meta device as torch's default device.
        loss: Function that returns the loss, given the model (or its method ``step``) and a batch.
        step: Name of the model's method that ``loss`` calls. Default: None, ``forward``.
        settings: Further arguments of `simulate`, and ``per_machine`` (GPUs per machine) if the run sets it.
    """

    name: str
    build_model: Callable[[], nn.Module]
    make_batch: Callable[[int], Any]
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer | list[Optimizer]]
    strategy: Callable[[int], Strategy]
    schedule: Callable[[Plan], Schedule]
    step: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def build_model_subject(options: argparse.Namespace) -> Subject:
    """Build the `Subject` of a standard transformer, selected with ``--model``, that is trained with AdamW."""
    sizes = sizes_of(options.model)
    if options.length is not None:
        sizes = replace(sizes, length=options.length)
    return Subject(
        name=options.model,
        build_model=partial(Decoder, sizes),
        make_batch=partial(tokens, sizes),
        loss=next_token_loss,
        optimizer=partial(torch.optim.AdamW, fused=True),
        strategy=partial(vary_strategy, options, options.strategy or "fsdp"),
        schedule=partial(_build_schedule, options),
        settings={"world_size": 1, "precision": "bf16-mixed"},
    )


def _build_schedule(options: argparse.Namespace, plan: Plan) -> Schedule:
    per_epoch = None if options.samples is None else -(-options.samples // plan.samples)
    epoch_limit = None if per_epoch is None or options.max_epochs is None else per_epoch * options.max_epochs
    step_limits = [steps for steps in (epoch_limit, options.max_steps) if steps is not None]
    steps = min(step_limits) if step_limits else None
    return Schedule(steps=steps, samples=options.samples, per_epoch=per_epoch)


def vary_strategy(options: argparse.Namespace, name: str | Strategy, world_size: int) -> Strategy:
    """Return a strategy with the options ``--replicate`` and ``--checkpoint-activations`` applied."""
    strategy = name if isinstance(name, Strategy) else simulated_world.strategy_named(name, world_size)
    changes: dict[str, Any] = {}
    if options.replicate is not None:
        changes["replicate"] = options.replicate
    if options.checkpoint_activations:
        changes["recompute"] = True
    return varied(strategy, **changes)
