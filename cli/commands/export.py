"""`treadle export`: conversion of a checkpoint's model to safetensors files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from ...common.command_results import fail, report
from ...common.messages import format_count
from ...common.remote_path import absolute, as_path
from .argument_parser import CommandParser

if TYPE_CHECKING:
    import torch

DESCRIPTION = """\
Write the full model of a checkpoint, without its optimizer, as safetensors. Shards are merged one tensor at a time, so
even a model larger than memory can be exported.

    treadle export runs/last.ckpt model.safetensors                     one file
    treadle export runs/last.ckpt weights/                              a folder in Hugging Face's format
    treadle export runs/last.ckpt weights/ --max-shard-size 2GB --dtype bfloat16

The files load with safetensors.torch.load_file, from_pretrained, or treadle.load_weights."""

_OTHER_ENDINGS = (".bin", ".pt", ".pth", ".ckpt")


def build_parser(program: str = "treadle export") -> CommandParser:
    """Return the argument parser of `treadle export`. It raises a ValueError for an invalid command line."""
    parser = CommandParser(program, DESCRIPTION)
    parser.add_argument("checkpoint", help="the checkpoint: a file, a folder or a URL")
    parser.add_argument("output", help="a file whose name ends in .safetensors, or a folder")
    parser.add_argument("--dtype", help="convert floating-point weights: float32, bfloat16, float16, float64")
    parser.add_argument("--max-shard-size", default="5GB", help="maximum size of a file in a folder (default: 5GB)")
    parser.add_argument(
        "--model", type=int, default=0, help="index of the model, if the run prepared several (default: 0)"
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run `treadle export` and return the exit status: 0 after success, 2 after an error."""
    try:
        options = build_parser().parse_args(arguments)
        exported = export(options.checkpoint, options.output, options.dtype, options.max_shard_size, options.model)
    except (ValueError, OSError) as error:
        return fail("treadle export", error)
    report(str(exported), exported._asdict())
    return 0


class Exported(NamedTuple):
    """Weights that `export` has written. As text, a summary.

    Attributes:
        output: The file or folder.
        tensors: Number of tensors, with those that share memory.
        bytes: Size of the tensors.
        left_out: Names of values in the checkpoint that are not tensors.
    """

    output: str
    tensors: int
    bytes: int
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        without = f", without values that are not tensors: {', '.join(self.left_out)}" if self.left_out else ""
        return f"{self.output}: {format_count(self.tensors, 'tensor')}, {format_count(self.bytes, 'byte')}{without}"


def export(
    checkpoint: str | Path,
    output: str | Path,
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    model: int = 0,
) -> Exported:
    """Write a checkpoint's model as safetensors, with one tensor in memory at a time.

    Args:
        checkpoint: Path or URL of a committed checkpoint, saved with any strategy and world size.
        output: Path or URL of a file whose name ends in ``.safetensors``, or of a folder. Existing weights are replaced
            once the new files are complete.
        dtype: The dtype to convert floating-point weights to, such as ``"bfloat16"``. Default: None, no conversion.
        max_shard_size: Maximum total size of the tensors in each file of a folder, in bytes or with a unit, such as
            ``"500MB"`` or ``"2GiB"``. A larger tensor gets a file of its own. Default: ``"5GB"``.
        model: Index of the model, if the run prepared several. Default: 0.

    Raises:
        ValueError: If an argument is invalid.
        OSError: If a file cannot be read or written.
    """
    # They import torch, which --help should not wait for.
    from ...engine.checkpoint import OpenCheckpoint, extra_part, model_part
    from ...engine.weights import (
        make_parent,
        nbytes,
        parse_shard_size,
        refuse_checkpoint,
        write_atomically,
        write_file,
        write_weights,
    )

    target = as_path(output)
    to_folder = _is_folder(output)
    refuse_checkpoint(absolute(target if to_folder else target.parent))
    saved = OpenCheckpoint(checkpoint)
    saved.verify()
    stored = saved.open_part(model_part(model))
    chosen = _parse_dtype(dtype)
    first: dict[int, str] = {}
    aliases = {name: first[id(tensor)] for name, tensor in stored.items() if first.setdefault(id(tensor), name) != name}
    tensors = {name: _Converted(tensor, chosen) for name, tensor in stored.items() if name not in aliases}
    left_out = saved.open_part(extra_part(model)) if saved.has(extra_part(model)) else ()
    if to_folder:
        write_weights(tensors, aliases, target, parse_shard_size(max_shard_size))
    else:
        make_parent(target)
        write_atomically(target, lambda temporary: write_file(Path(temporary), tensors, aliases))
    size = sum(nbytes(tensor) for tensor in tensors.values())
    return Exported(str(target), len(stored), size, tuple(left_out))


def _is_folder(output: str | Path) -> bool:
    """Return whether an output is a folder. Names such as Qwen2.5-7B are folders although they contain a dot."""
    target = as_path(output)
    if target.is_dir() or str(output).endswith(("/", os.sep)):
        return True
    suffix = PurePosixPath(target.name).suffix
    if suffix in _OTHER_ENDINGS:
        raise ValueError(
            f"{target}: weights are written as safetensors, so a file's name must end in .safetensors. "
            f"To create a folder with this name, write {target}/."
        )
    return suffix != ".safetensors"


def _parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    import torch

    from ...common.validation import choose

    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    if isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype={dtype} must be a floating-point dtype, such as torch.bfloat16.")
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
    names |= {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
    return names[choose("dtype", dtype, names)]


class _Converted:
    """Tensor that is read on demand and, if it is floating-point, converted to ``dtype``."""

    def __init__(self, stored: Any, dtype: torch.dtype | None) -> None:
        self._stored = stored
        self.shape = stored.shape
        self.dtype = stored.dtype if dtype is None or not stored.dtype.is_floating_point else dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        values: torch.Tensor = self._stored[index]
        return values.to(self.dtype)
