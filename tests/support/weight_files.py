"""Files of weights in every form, and small networks to fill from them."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import treadle


def net(width=5):
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def filled(seed=0, **kwargs):
    torch.manual_seed(seed)
    model = net(**kwargs)
    for value in model.state_dict().values():
        value.copy_(torch.randn(value.shape) * 10)
    return model


def same(model, state):
    own = model.state_dict()
    return own.keys() == state.keys() and all(torch.equal(own[name], state[name]) for name in own)


def digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def pt(state, folder, name="weights.pt", **options):
    torch.save(state, folder / name, **options)
    return folder / name


def shards(state, folder, ending, write):
    names = list(state)
    files = {f"part-{n}.{ending}": names[n::2] for n in range(2)}
    for file, held in files.items():
        write({name: state[name] for name in held}, folder / file)
    stem = "model.safetensors" if ending == "safetensors" else "pytorch_model.bin"
    places = {name: file for file, held in files.items() for name in held}
    (folder / f"{stem}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def keep_map_alone(folder):
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps(json.loads(index.read_text())["weight_map"]))
    return index


def treadle_checkpoint(model, folder):
    accelerator = treadle.Accelerator(cpu=True)
    accelerator.prepare(model)
    return accelerator.save_state(folder / "step-1")


def linked(state, folder):
    """As Hugging Face's cache lays files out: links to blobs."""
    (folder / "blobs").mkdir()
    (folder / "snapshot").mkdir()
    save_file(state, folder / "blobs" / "abc")
    (folder / "snapshot" / "model.safetensors").symlink_to(folder / "blobs" / "abc")
    return folder / "snapshot"


SOURCES = {
    "treadle": lambda m, s, d: treadle_checkpoint(m, d),
    "safetensors": lambda m, s, d: save_file(s, d / "w.safetensors") or d / "w.safetensors",
    "safetensors of another name": lambda m, s, d: save_file(s, d / "w.bin") or d / "w.bin",
    "folder": lambda m, s, d: save_file(s, d / "model.safetensors") or d,
    "folder of links": lambda m, s, d: linked(s, d),
    "shards": lambda m, s, d: shards(s, d, "safetensors", save_file) or d,
    "index": lambda m, s, d: shards(s, d, "safetensors", save_file) or d / "model.safetensors.index.json",
    "index without metadata": lambda m, s, d: shards(s, d, "bin", torch.save) or keep_map_alone(d),
    "bin": lambda m, s, d: pt(s, d, "pytorch_model.bin").parent,
    "bin shards": lambda m, s, d: shards(s, d, "bin", torch.save) or d,
    "torch": lambda m, s, d: pt(s, d),
    "torch under another name": lambda m, s, d: pt(s, d, "weights.safetensors"),
    "torch before 1.6": lambda m, s, d: pt(s, d, _use_new_zipfile_serialization=False),
    "parameters": lambda m, s, d: pt({**s, **dict(m.named_parameters())}, d),
    "state_dict": lambda m, s, d: pt({"epoch": 3, "state_dict": s, "lr": 0.1}, d, "x.ckpt"),
    "model_state_dict": lambda m, s, d: pt({"model_state_dict": s, "optimizer": {}}, d, "x.pth"),
    "model": lambda m, s, d: pt({"model": s, "loss": torch.ones(1)}, d),
    "of DDP": lambda m, s, d: pt({f"module.{name}": value for name, value in s.items()}, d),
    "of a compiled one in Fabric": lambda m, s, d: pt({f"_forward_module._orig_mod.{n}": v for n, v in s.items()}, d),
    "of FSDP1": lambda m, s, d: pt({n.replace(".", "._fsdp_wrapped_module.", 1): v for n, v in s.items()}, d),
    "protocol 4": lambda m, s, d: pt(s, d, pickle_protocol=4),
}


class Task(treadle.TaskModule):
    def __init__(self, width=4, path=None, given="default", namespace=None, config=None, number=None):
        super().__init__()
        self.arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.net = net(width)
        self.seen = None

    def on_load_checkpoint(self, checkpoint):
        self.seen = checkpoint


def lightning_file(task, hyper_parameters, **more):
    state = {name: (torch.randn(value.shape) * 9).to(value.dtype) for name, value in task.state_dict().items()}
    optimizer = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3).t()}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
    }
    callbacks = {
        "ModelCheckpoint{'monitor': 'loss'}": {
            "best_model_score": torch.tensor(1.5),
            "best_k_models": {"a": torch.tensor(1.0)},
        }
    }
    return {
        "epoch": 3, "global_step": 12, "pytorch-lightning_version": "2.6.6", "state_dict": state,
        "loops": {"fit_loop": {}}, "callbacks": callbacks, "optimizer_states": [optimizer], "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": hyper_parameters, **more,
    }  # fmt: skip
