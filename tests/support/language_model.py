"""A small language model with tied ends, and what compares one that is loaded in parts with the plain one."""

import json

import torch
from safetensors.torch import save_file, save_model
from torch import nn
from treadle.engine.big_models import init_empty_weights

from support import stored


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x)))) * self.scale


class LanguageModel(nn.Module):
    """Tied ends, a parameter of its own, a stack, several inputs, and a dict for an output."""

    def __init__(self, words=53, width=32, depth=3):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.positions = nn.Parameter(torch.randn(16, width))
        self.register_buffer("mask", torch.ones(16, 16).tril(), persistent=False)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words, bias=None, *, extra=None):
        hidden = self.embed(words) + self.positions[: words.shape[1]]
        hidden = self.mask[: words.shape[1], : words.shape[1]] @ hidden
        for layer in self.layers:
            hidden = layer(hidden)
        if extra is not None:
            hidden = hidden + extra["shift"]
        logits = self.head(hidden)
        return {"logits": logits if bias is None else logits + bias, "hidden": hidden}


def empty(kind=LanguageModel):
    with init_empty_weights():
        return kind().eval()


LAYER = 4 * (2 * 32 + 2 * 32 * 32 * 2 + 64 + 32 + 32)  # norm, up and down, their biases, scale: of four bytes each


EMBED, POSITIONS, MASK = 4 * 53 * 32, 4 * 16 * 32, 4 * 16 * 16


def write(plain, path, form):
    """The model's checkpoint in one of the forms that can be read."""
    if form == "file":
        save_model(plain, str(path / "one.safetensors"))  # leaves the tied name out
        return path / "one.safetensors"
    if form == "treadle":
        files = stored.write_part(path / "step-1", "model", plain.state_dict())
        return stored.commit(path / "step-1", files, {"step": 1})
    if form == "torch":
        torch.save(plain.state_dict(), path / "model.pt")
        return path / "model.pt"
    state = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    names, places = list(state), {}
    for number in (1, 2):
        part = names[(number - 1) * 9 : number * 9 if number == 1 else None]
        save_file({name: state[name] for name in part}, path / f"model-{number}.safetensors")
        places |= dict.fromkeys(part, f"model-{number}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


def inputs():
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, 53, (1, 7), generator=generator)
    return (words, torch.randn(53, generator=generator)), {"extra": {"shift": torch.randn(32, generator=generator)}}


@torch.no_grad()
def assert_same(model, plain, calls=2):
    args, kwargs = inputs()
    expected = plain(*args, **kwargs)
    for _ in range(calls):
        found = model(*args, **kwargs)
        assert torch.equal(found["logits"], expected["logits"])
        assert torch.equal(found["hidden"], expected["hidden"])


def offloaded(model):
    return {name for name, tensor in model.state_dict().items() if tensor.is_meta}
