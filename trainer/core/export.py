"""Export of a task's computation, or of its weights, to files."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import torch
from torch import Tensor, nn

from ...common.messages import warn
from ...common.optional import require
from ...common.remote_path import absolute, is_url
from ...common.validation import choose
from ...engine import move_data_to_device, plain_calls
from ...engine.weights import make_parent, save_object, write_atomically
from ...strategies import iter_tensors
from ...strategies.distributed import is_sharded, strip_compile_prefix

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.onnx import ONNXProgram


class Exports(nn.Module):
    """Base class of `TaskModule` with its export methods."""

    example_input_array: Any

    def to_onnx(
        self, file_path: str | Path | BinaryIO | None = None, input_sample: Any = None, **kwargs: Any
    ) -> ONNXProgram:
        """Return ``forward`` as an ONNX program. Requires the packages onnx and onnxscript.

        Args:
            file_path: Path or URL of the ONNX file, or a file that is open for binary writing; None writes no file.
                Default: None.
            input_sample: Input of ``forward``: a tensor, a tuple or list of arguments, or a dict of keywords. Default:
                ``example_input_array``.
            kwargs: Keyword arguments of ``torch.onnx.export``, such as ``dynamic_shapes={"x": {0: "batch"}}``.

        Raises:
            ModuleNotFoundError: If a package is missing.
            ValueError: If the task or an argument does not allow the export, or the program's output shapes differ from
                those of the model.
        """
        require("to_onnx", "onnx", "onnxscript", extra="onnx")
        if (dynamo := kwargs.pop("dynamo", True)) is not True:
            raise ValueError(
                f"dynamo={dynamo!r} is not supported, because torch has deprecated its export based on TorchScript. "
                "Remove dynamo."
            )
        with _for_export(self, "to_onnx"):
            args, keywords = _prepare_arguments(self, "to_onnx", input_sample)
            expected = self(*args, **keywords)
            program = torch.onnx.export(self, args, kwargs=keywords, dynamo=True, **kwargs)
        assert program is not None
        shapes = [None if value.shape is None else list(value.shape) for value in program.model.graph.outputs]
        _check_shapes("to_onnx", [list(t.shape) for t in iter_tensors(expected)], shapes)
        if isinstance(file_path, str) and is_url(file_path):
            content = program.model_proto.SerializeToString()
            _write(file_path, lambda file: Path(file).write_bytes(content))
        elif isinstance(file_path, str | os.PathLike):
            Path(file_path).parent.mkdir(parents=True, exist_ok=True)
            program.save(file_path)  # weights over 2 GB are stored in a second file, which is named after this one
        elif file_path is not None:
            file_path.write(program.model_proto.SerializeToString())
        return program

    def to_torch_export(
        self, file_path: str | Path | None = None, input_sample: Any = None, **kwargs: Any
    ) -> ExportedProgram:
        """Return ``forward`` as a graph of torch operations, exported by ``torch.export``.

        Args:
            file_path: Path or URL of the ``.pt2`` file, which ``torch.export.load`` loads; None writes no file.
                Default: None.
            input_sample: See `to_onnx`.
            kwargs: Keyword arguments of ``torch.export.export``, such as ``dynamic_shapes``.

        Raises:
            ValueError: If the task or an argument does not allow the export, or the program's output shapes differ from
                those of the model.
        """
        if file_path is not None and Path(file_path).suffix != ".pt2":
            raise ValueError(f"file_path={os.fspath(file_path)!r} must end in .pt2, the suffix that torch expects.")
        with _for_export(self, "to_torch_export"):
            args, keywords = _prepare_arguments(self, "to_torch_export", input_sample)
            expected = self(*args, **keywords)
            program = torch.export.export(self, args, keywords, **kwargs)
            actual = program.module()(*args, **keywords)
        _check_shapes(
            "to_torch_export", *([list(t.shape) for t in iter_tensors(output)] for output in (expected, actual))
        )
        if file_path is not None:
            _write(file_path, lambda file: torch.export.save(program, file))
        return program

    def to_safetensors(self, file_path: str | Path) -> None:
        """Write the tensors in ``state_dict`` to one safetensors file. The write is atomic.

        `load_weights` loads the file. Tied weights are written once.

        Args:
            file_path: Path or URL of the file.

        Raises:
            ValueError: If the model is sharded or not built.
            TypeError: If safetensors does not support a tensor.
        """
        _refuse_shards(self, "to_safetensors")
        make_parent(absolute(file_path))
        state = {
            strip_compile_prefix(name): value for name, value in self.state_dict().items() if isinstance(value, Tensor)
        }
        save_object(state, file_path, safe=True)

    def to_torchscript(
        self,
        file_path: str | Path | None = None,
        method: str | None = "script",
        example_inputs: Any = None,
        **kwargs: Any,
    ) -> torch.jit.ScriptModule:
        """Return ``forward`` as TorchScript, which torch has deprecated; see `to_torch_export`.

        Args:
            file_path: Path or URL of the file, which ``torch.jit.load`` loads; None writes no file. Default: None.
            method: ``"script"`` compiles the source of ``forward``; ``"trace"`` records one call. Default:
                ``"script"``.
            example_inputs: Input of ``forward`` for ``"trace"``, in the forms of ``input_sample``; see `to_onnx`.
                Default: ``example_input_array``.
            kwargs: Keyword arguments of ``torch.jit.script`` or ``torch.jit.trace``.

        Raises:
            ValueError: If the task or an argument does not allow the export.
        """
        warn(
            "to_torchscript: TorchScript is deprecated in torch and no longer maintained. Use to_onnx or "
            "to_torch_export. Files of to_torch_export can be loaded with torch.export.load, or compiled for C++ with "
            "AOTInductor."
        )
        method = choose("method", method or "script", ("script", "trace"))
        with _for_export(self, "to_torchscript"), _readable_properties(self), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit.*deprecated", DeprecationWarning)  # see the warning above
            if method == "script":
                module = torch.jit.script(self, **kwargs)
            else:
                args, keywords = _prepare_arguments(self, "to_torchscript", example_inputs)
                inputs = {"example_kwarg_inputs": keywords} if keywords else {"example_inputs": args}
                module = torch.jit.trace(self, **inputs, **kwargs)
            if file_path is not None:
                _write(file_path, lambda file: torch.jit.save(module, file))
        return module

    def to_tensorrt(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError with the name of the function to use.

        Args:
            args: Ignored.
            kwargs: Ignored.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "to_tensorrt is not supported. Pass the result of to_torch_export to torch_tensorrt.dynamo.compile."
        )


def _write(file_path: str | Path, write: Callable[[str], object]) -> None:
    target = absolute(file_path)
    make_parent(target)
    write_atomically(target, write)


@contextmanager
def _for_export(task: nn.Module, method: str) -> Iterator[None]:
    """Set evaluation mode and disable gradients and compilation within a context."""
    from ...engine import evaluation_mode

    _refuse_shards(task, method)
    if type(task).forward is nn.Module.forward:
        raise ValueError(f"{method} exports forward, but {type(task).__name__} has no forward. Define forward.")
    with torch.no_grad(), evaluation_mode(task), plain_calls(task):
        yield


@contextmanager
def _readable_properties(task: nn.Module) -> Iterator[None]:
    """Make properties that need a missing Trainer raise AttributeError, so that TorchScript skips them."""
    detached = [part for part in task.modules() if part.__dict__.get("_trainer", task) is None]
    for part in detached:
        part.__dict__["_trainer"] = SimpleNamespace()
    try:
        yield
    finally:
        for part in detached:
            part.__dict__["_trainer"] = None


def _refuse_shards(task: nn.Module, method: str) -> None:
    if any(is_sharded(parameter) or parameter.is_meta for parameter in task.parameters()):
        raise ValueError(
            f"{method}: this {type(task).__name__} is sharded or not built yet, so no process holds the full model. "
            f"Load a checkpoint with {type(task).__name__}.load_from_checkpoint(path), and export the task that it "
            "returns."
        )


def _prepare_arguments(task: Any, method: str, sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    sample = task.example_input_array if sample is None else sample
    if sample is None:
        argument = "example_inputs" if method == "to_torchscript" else "input_sample"
        raise ValueError(
            f"{method} needs an example input. Pass {argument}, or set {type(task).__name__}.example_input_array."
        )
    sample = move_data_to_device(sample, task.device)
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (tuple(sample) if isinstance(sample, tuple | list) else (sample,)), {}


def _check_shapes(method: str, expected: list[Any], actual: list[Any]) -> None:
    """Raise a ValueError unless the exported program's output shapes match those of ``forward``.

    In ``actual``, an unknown shape (None) and a symbolic size match any value.
    """
    fits = len(expected) == len(actual) and all(
        have is None
        or (len(want) == len(have) and all(not isinstance(n, int) or n == m for n, m in zip(have, want, strict=True)))
        for want, have in zip(expected, actual, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{method}: forward returns tensors with the shapes {expected}, but the exported program returns the "
            f"shapes {actual}. Rewrite the operations in forward whose output shapes depend on values."
        )
