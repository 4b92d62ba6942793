"""Offloaded weights in Accelerate's format: ``index.json``, and one file of raw bytes per tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...common.messages import nearest
from ...engine.big_models.offload_file import INDEX, open_offloaded, open_raw_file
from ...engine.checkpoint import read_tensor


def offload_weight(
    weight: Tensor,
    weight_name: str,
    offload_folder: str | os.PathLike[str],
    index: MutableMapping[str, Any] | None = None,
) -> MutableMapping[str, Any] | None:
    """Write a tensor's bytes to ``offload_folder/weight_name.dat``, and return ``index``.

    If ``index`` is not None, the tensor's dtype and shape are added to it.
    """
    plain = weight.detach().to("cpu").contiguous()
    plain.reshape(-1).view(torch.uint8).numpy().tofile(Path(offload_folder) / f"{weight_name}.dat")
    if index is not None:
        index[weight_name] = {"dtype": str(plain.dtype).removeprefix("torch."), "shape": list(plain.shape)}
    return index


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> Tensor:
    """Load a tensor with the dtype and shape in ``weight_info`` from a file that `offload_weight` wrote."""
    return read_tensor(open_raw_file(Path(weight_file), weight_info))


def save_offload_index(index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]) -> None:
    """Add the dtypes and shapes of tensors to the ``index.json`` of a folder. Without entries, no file is written."""
    if not index:
        return
    path = Path(offload_folder) / INDEX
    entries = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps({**entries, **index}, indent=2), encoding="utf-8")


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, Tensor]) -> None:
    """Write the tensors of a state dict and their index to a folder, which is created if it is missing."""
    os.makedirs(save_dir, exist_ok=True)
    index: dict[str, Any] = {}
    for name, tensor in state_dict.items():
        offload_weight(tensor, name, save_dir, index)
    save_offload_index(index, save_dir)


def extract_submodules_state_dict(
    state_dict: Mapping[str, Tensor], submodule_names: Iterable[str]
) -> dict[str, Tensor]:
    """Return the entries of a state dict that belong to the named modules or tensors."""
    return {
        name: tensor
        for module in submodule_names
        for name, tensor in state_dict.items()
        if name == module or name.startswith(f"{module}.")
    }


class PrefixedDataset(Mapping[str, Any]):
    """View of a mapping in which ``key`` is looked up as ``prefix + key``.

    As in Accelerate, iteration yields full keys that begin with the prefix, and the length is that of the mapping.
    """

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset, self.prefix = dataset, prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __contains__(self, key: object) -> bool:  # Mapping's own method would read the tensor
        return f"{self.prefix}{key}" in self.dataset

    def __iter__(self) -> Iterator[str]:  # the full keys, as in Accelerate, whose callers remove the prefix
        return (key for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return len(self.dataset)


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """Mapping of weights by name, which are in memory or are read from disk at each access.

    Args:
        state_dict: Tensors in memory, which take precedence over those on disk.
        save_folder: A folder that `offload_state_dict` wrote.
        index: Tensors on disk: for each name, a dict with ``"dtype"`` and ``"shape"``, or with ``"safetensors_file"``
            and optional ``"weight_name"`` and ``"dtype"``. Default: the folder's index.
        device: The device for tensors from safetensors files. Default: the CPU.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Any] | None = None,
        device: Any = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError("OffloadedWeightsLoader got no weights. Pass state_dict, save_folder or index.")
        if index is None and save_folder is not None:
            index = json.loads((Path(save_folder) / INDEX).read_text(encoding="utf-8"))
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        self.index = {} if index is None else index
        self.device = device
        self.all_keys = list(dict.fromkeys([*self.state_dict, *self.index]))

    def __getitem__(self, key: str) -> Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        if key not in self.index:
            raise KeyError(f"there is no offloaded weight with the name {key!r}.{nearest(key, self.all_keys)}")
        info = self.index[key]
        tensor = read_tensor(open_offloaded(self.save_folder, {key: info})[key])
        if "safetensors_file" not in info:
            return tensor
        return tensor.to(self.device or "cpu", getattr(torch, info["dtype"]) if "dtype" in info else tensor.dtype)

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)
