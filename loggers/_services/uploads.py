"""Queue of the checkpoints to upload to a tracking service."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...common.messages import warn
from ...common.remote_path import is_url
from ..values import plain


class Uploads:
    """Queue of the checkpoints to upload to a tracking service.

    Args:
        mode: True uploads the kept checkpoints at the end of a fit, or each one when it is saved with
            ``ModelCheckpoint(save_top_k=-1)``; ``"all"`` uploads each one when it is saved; False uploads none.
    """

    def __init__(self, mode: bool | str) -> None:
        self._mode = mode
        self._callbacks: dict[int, Any] = {}
        self._was_notified = False
        self._warned_of_url = False
        self._uploaded_times: dict[str, int] = {}

    def collect_after_save(self, callback: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Yield the path, callback and metadata of each checkpoint to upload after a save."""
        self._was_notified = True
        if self._mode == "all" or (self._mode and callback.save_top_k == -1):
            yield from self._iterate_new(callback)
        elif self._mode:
            self._callbacks[id(callback)] = callback

    def collect_at_end(self) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Yield the path, callback and metadata of each checkpoint to upload at the end of a fit."""
        if self._mode and not self._was_notified:
            warnings.warn(
                f"log_model={self._mode!r} uploads nothing, because the logger was not notified of any checkpoint. Use "
                "a ModelCheckpoint. Without a Trainer, call the logger's after_save_checkpoint(callback) after each "
                "save.",
                stacklevel=4,
            )
        for callback in self._callbacks.values():
            yield from self._iterate_new(callback)

    def _iterate_new(self, callback: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        scores_by_path = {
            callback.last_model_path: callback.current_score,
            callback.best_model_path: callback.best_model_score,
        }
        for path, score in {**scores_by_path, **callback.best_k_models}.items():
            if is_url(path) and not self._warned_of_url:
                self._warned_of_url = True
                warn(
                    f"log_model={self._mode!r} uploads checkpoints on disk only, so those in "
                    f"{path.rpartition('/')[0]} are not uploaded. Set log_model=False, or save to a directory."
                )
            if not path or is_url(path) or not os.path.exists(path):
                continue
            written = os.stat(path).st_mtime_ns  # another checkpoint may take the same path
            if self._uploaded_times.get(path) == written:
                continue
            settings = ("monitor", "mode", "save_last", "save_top_k", "save_weights_only", "every_n_train_steps")
            facts = {"score": score, "original_filename": Path(path).name}
            yield path, callback, plain({**facts, type(callback).__name__: {s: getattr(callback, s) for s in settings}})
            self._uploaded_times[path] = written
