"""A model spread over the memory there is, with parts on disk; one that is made empty and then filled."""

import os

import torch
from accelerate import dispatch_model, infer_auto_device_map, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.utils import compute_module_sizes, get_balanced_memory
from torch import nn


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(size), nn.Linear(size, size)

    def forward(self, x):
        return x + torch.tanh(self.fc(self.norm(x)))


class Model(nn.Module):
    _no_split_modules = ["Block"]

    def __init__(self, size=8, depth=4):
        super().__init__()
        self.stem = nn.Linear(size, size)
        self.blocks = nn.Sequential(*[Block(size) for _ in range(depth)])
        self.head = nn.Linear(size, 2)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))


def main(folder):
    torch.manual_seed(47)
    model, x = Model(), torch.randn(3, 8)
    with torch.no_grad():
        plain = model(x)
    sizes = compute_module_sizes(model)
    max_memory = {"cpu": 1300, "disk": 10**9}
    device_map = infer_auto_device_map(model, max_memory=max_memory, no_split_module_classes=Model._no_split_modules)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    main_device = next((d for d in device_map.values() if d not in ["cpu", "disk"]), "cpu")
    offload_dir = os.path.join(folder, "offload")
    os.makedirs(offload_dir, exist_ok=True)
    options = {"main_device": main_device, "offload_dir": offload_dir, "offload_buffers": False}
    model = dispatch_model(model, device_map=device_map, **options)
    with torch.no_grad():
        spread = model(x)
    with init_empty_weights():
        empty = Model()
    devices = sorted({str(p.device) for p in empty.parameters()})
    path = os.path.join(folder, "pytorch_model.bin")
    torch.save(state, path)
    loaded = load_checkpoint_and_dispatch(empty, path, device_map={"": "cpu"}, no_split_module_classes=["Block"])
    with torch.no_grad():
        again = loaded(x)
    balanced = get_balanced_memory(Model(), max_memory={"cpu": 10**6}, no_split_module_classes=["Block"])
    return {
        "device_map": {name: str(place) for name, place in device_map.items()},
        "sizes": {name: int(size) for name, size in sizes.items() if name.count(".") < 2},
        "outputs": plain.flatten().tolist(),
        "spread": (spread - plain).abs().max().item(),
        "loaded": (again - plain).abs().max().item(),
        "empty": devices,
        "balanced": {str(name): int(size) for name, size in balanced.items()},
    }
