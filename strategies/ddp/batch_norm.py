"""Batch normalization over the samples of all processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...common.messages import name_type
from ..distributed import World

_REPLACEABLE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class TorchSyncBatchNorm:
    """Trainer plugin that is equivalent to ``sync_batchnorm=True``.

    Examples:
        >>> import treadle
        >>> from treadle.strategies import TorchSyncBatchNorm
        >>> trainer = treadle.Trainer(plugins=[TorchSyncBatchNorm()], logger=False)
    """


def synchronize(module: nn.Module, world: World) -> None:
    """Replace the BatchNorm layers within ``module`` with synchronized ones.

    The new layers have the same parameters, buffers and hooks, under the same names.
    """
    # torch's SyncBatchNorm does not support the CPU, at least up to 2.13.
    kind: type[_BatchNorm] = GlobalBatchNorm if world.device.type == "cpu" else nn.SyncBatchNorm
    if isinstance(module, _BatchNorm):
        raise ValueError(
            f"sync_batchnorm=True can't replace the model itself, which is {name_type(module)}. Put the layer inside a "
            "module."
        )
    replacements: dict[nn.Module, nn.Module] = {}
    for name, parent in list(module.named_modules()):
        for child_name, child in list(parent._modules.items()):
            if not isinstance(child, _BatchNorm) or type(child) is kind:
                continue
            if type(child) not in (*_REPLACEABLE, nn.SyncBatchNorm):
                layer_name = f"{name}.{child_name}" if name else child_name
                raise ValueError(
                    f"sync_batchnorm=True supports BatchNorm1d, BatchNorm2d and BatchNorm3d, but layer "
                    f"{layer_name!r} is {name_type(child)}. Use one of these classes, or remove sync_batchnorm."
                )
            if child not in replacements:
                replacements[child] = _convert_layer(kind, child, world.group)
            parent._modules[child_name] = replacements[child]


def _convert_layer(kind: type[_BatchNorm], layer: _BatchNorm, group: Any) -> _BatchNorm:
    new = kind.__new__(kind)
    new.__dict__.update(layer.__dict__)
    new.process_group = getattr(layer, "process_group", None) or group
    return new


class GlobalBatchNorm(_BatchNorm):
    """``SyncBatchNorm`` for the CPU. Its statistics weight the samples of all processes equally."""

    process_group: Any

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                "batch normalization needs an input with at least 2 dimensions (samples and channels), but the input "
                f"has the shape {tuple(input.shape)}. Reshape the input."
            )

    def forward(self, input: Tensor) -> Tensor:
        """Normalize an input of shape (samples, channels, ...).

        In training mode, the statistics cover the samples of all processes.
        """
        if not self.training or not dist.is_initialized() or dist.get_world_size(self.process_group) == 1:
            return super().forward(input)
        self._check_input_dim(input)
        output, mean, var, total = _Normalise.apply(input, self.weight, self.bias, self.eps, self.process_group)
        if self.track_running_stats and self.running_mean is not None:
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            self.running_var.lerp_((var * (total / (total - 1))).to(self.running_var.dtype), share)
        return output


class _Normalise(torch.autograd.Function):
    """Batch normalization with one collective per pass. `forward` exchanges means, squared deviations and counts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Any) -> Any:
        dims, shape = [0, *range(2, x.dim())], [1, -1] + [1] * (x.dim() - 2)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        channels, count = x.size(1), x.numel() // max(x.size(1), 1)
        local_stats = wide.new_zeros(2 * channels + 1)
        if count:
            local_stats[:channels] = wide.mean(dims)
            local_stats[channels:-1] = (wide - local_stats[:channels].view(shape)).square_().sum(dims)
            local_stats[-1] = count
        parts = [torch.empty_like(local_stats) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, local_stats, group)
        rank_stats = torch.stack(parts)
        means, deviations, counts = rank_stats[:, :channels], rank_stats[:, channels:-1], rank_stats[:, -1:]
        total = counts.sum()
        if total < 2:
            raise ValueError(
                "in training, batch normalization needs at least 2 values per channel over all processes. Use a larger "
                "batch."
            )
        mean = (means * counts).sum(0) / total
        # Computed from each process's own mean, because the difference of two sums of squares would lose half of the
        # digits.
        var = (deviations + counts * (means - mean).square()).sum(0) / total
        inverse = (var + eps).rsqrt()
        normal = (wide - mean.view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normal, weight, inverse, total)
        ctx.dims, ctx.shape, ctx.group = dims, shape, group
        ctx.dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, var, total)
        out = normal if weight is None else normal * weight.view(shape)
        out = out if bias is None else out + bias.view(shape)
        return out.to(x.dtype), mean, var, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        normal, weight, inverse, total = ctx.saved_tensors
        gradient = gradient.to(normal.dtype)
        local_sums = torch.stack((gradient.sum(ctx.dims), (gradient * normal).sum(ctx.dims)))
        sums = local_sums.clone()
        dist.all_reduce(sums, group=ctx.group)
        plain, along = (sums / total).view(2, *ctx.shape)
        factor = inverse if weight is None else inverse * weight
        to_input = (gradient - plain - normal * along) * factor.view(ctx.shape)
        to_weight = None if weight is None else local_sums[1].to(weight.dtype)
        to_bias = None if ctx.bias_dtype is None else local_sums[0].to(ctx.bias_dtype)
        return to_input.to(ctx.dtype), to_weight, to_bias, None, None
