"""`RankLogger`, whose records appear once per job instead of once per process, and its factory."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Any

from ..strategies.distributed import current_place, current_world


class RankLogger(logging.LoggerAdapter):  # type: ignore[type-arg]
    """Adapter of a standard logger that logs on rank zero only, by default. It works without an Accelerator.

    Each logging method takes the additional arguments ``main_process_only`` and ``in_order``; see `log`.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._warned_texts: set[str] = set()

    def log(  # type: ignore[override]
        self,
        level: int,
        msg: object,
        *args: Any,
        main_process_only: bool = True,
        in_order: bool = False,
        **kwargs: Any,
    ) -> None:
        """Log ``msg`` at ``level`` on the requested ranks.

        Args:
            level: The record's level, such as ``logging.INFO``.
            msg: The message, a format string for ``args``.
            *args: Arguments of the message.
            main_process_only: Whether only rank zero logs, unless ``in_order`` is True. Default: True.
            in_order: Whether all ranks, which must all call the method, log one after the other. Default: False.
            **kwargs: Keyword arguments of ``Logger.log``. As in Accelerate, ``stacklevel`` counts this method too.
        """
        rank, size, _ = current_place()
        kwargs.setdefault("stacklevel", 2)
        turns = range(size) if in_order else [rank]
        world = current_world() if in_order and size > 1 else None
        for turn in turns:
            # Called even if this process's level hides the record, because the other ranks wait for it.
            if turn == rank and (in_order or not main_process_only or rank == 0) and self.isEnabledFor(level):
                text, options = self.process(msg, kwargs)
                self.logger.log(level, text, *args, **options)
            if world is not None:
                world.barrier()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Prefix the message with the rank if there are several processes."""
        rank, size, _ = current_place()
        return (f"[RANK {rank}] {msg}" if size > 1 else msg), kwargs

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a warning, as `log` does, only the first time that this `RankLogger` receives its text."""
        text = str(msg) % args if args else str(msg)
        if text not in self._warned_texts:
            self._warned_texts.add(text)
            kwargs.setdefault("stacklevel", 3)
            self.warning(msg, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "logger":
            raise AttributeError(name)
        return getattr(self.logger, name)  # addHandler, handlers, propagate and other attributes


def get_logger(name: str, log_level: str | int | None = None) -> RankLogger:
    """Return a logger that, by default, logs once per job instead of once per process.

    Args:
        name: The logger's name, such as ``__name__``.
        log_level: The lowest level to log. Default: None, which selects the value of the environment variable
            ``ACCELERATE_LOG_LEVEL``. If the variable is not set, the logger's level is unchanged.
    """
    logger = logging.getLogger(name)
    if log_level is None:
        log_level = os.environ.get("ACCELERATE_LOG_LEVEL")
    if log_level is not None:
        logger.setLevel(log_level.upper() if isinstance(log_level, str) else log_level)
    return RankLogger(logger)
