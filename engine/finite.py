"""Whether a model's weights are numbers: one look before they are saved for good."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..strategies.shards import local


def not_finite(model: nn.Module) -> list[str]:
    """The names of tensors that no checkpoint should hold, of this process's part of a model; empty for a sound one.

    A trained parameter must be finite. Of everything else NaN is refused alone: masks and ranges hold infinities.

    One pass over the memory, and one read of the device.
    """
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    others = {
        name: t.detach() for name, t in model.state_dict().items() if isinstance(t, Tensor) and name not in trained
    }
    tensors = {n: _plain(t) for n, t in (trained | others).items() if t.is_floating_point() or t.is_complex()}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.numel() and not tensor.is_meta}
    suspects: list[str] = []
    for device in {tensor.device for tensor in tensors.values()}:
        here = [name for name, tensor in tensors.items() if tensor.device == device]
        # A sum is finite only if all its terms are. The other way round is not so: those are looked at one by one.
        sums = torch.stack([_sum(tensors[name]) for name in here])
        fine = torch.isfinite(sums).tolist()
        suspects += [name for name, good in zip(here, fine, strict=True) if not good]
    return [name for name in tensors if name in suspects and _is_bad(tensors[name], name in trained)]


def _plain(tensor: Tensor) -> Tensor:
    tensor = local(tensor)
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.element_size() == 1 else tensor  # 8-bit formats can't be added up


def _sum(tensor: Tensor) -> Tensor:
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return tensor.sum(dtype=wide).to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def _is_bad(tensor: Tensor, trained: bool) -> bool:
    return not bool(torch.isfinite(tensor).all()) if trained else bool(torch.isnan(tensor).any())
