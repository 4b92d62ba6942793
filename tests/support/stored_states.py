"""States that are saved to a store without a run, and what is compared of them."""

import os

import torch
from treadle.engine.checkpoint import filesystem
from treadle.engine.checkpoint import store as checkpoint

from support import stored

FILES = ("model.safetensors", "state.json", "state.safetensors", "rank-00000.json", "rank-00000.safetensors")


def model_state(step):
    return {"weight": torch.full((3, 2), float(step)), "bias": torch.full((3,), -float(step))}


def save(target, step, others=False, **info):
    files = stored.write_part(target, "model", model_state(step))
    files |= stored.write_part(target, "state", {"lr": 0.1 * step, "exp_avg": torch.full((5,), float(step))})
    files |= stored.write_part(target, "rank-00000", {"random": (step, torch.arange(step + 1))})
    return stored.commit(target, files, {"step": step, **info}, others)


def assert_holds(path, step):
    """The checkpoint at ``path`` is intact and is the one of this step."""
    assert checkpoint.verify(path).step == step
    assert equal(stored.read_part(path, "model"), model_state(step))
    state = stored.read_part(path, "state")
    assert state["lr"] == 0.1 * step
    assert torch.equal(state["exp_avg"], torch.full((5,), float(step)))
    assert torch.equal(stored.read_part(path, "rank-00000")["random"][1], torch.arange(step + 1))


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def put_things_into(path):
    """What a user may keep in a checkpoint's directory."""
    (path / "notes" / "deep").mkdir(parents=True)
    (path / "notes" / "deep" / "a.txt").write_text("mine")
    (path / "tokenizer.json").write_text("mine")
    (path / "link").symlink_to(path.parent / "nowhere")
    save(path / "best", 7)


def assert_has_things(path, tokenizer="tokenizer.json"):
    assert (path / "notes" / "deep" / "a.txt").read_text() == "mine"
    assert (path / tokenizer).read_text() == "mine"
    assert os.readlink(path / "link") == str(path.parent / "nowhere")
    assert_holds(path / "best", 7)


ENTRY = {"bytes": 1, filesystem.DIGEST: "0" * 32}
