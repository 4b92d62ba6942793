"""Metrics, hyperparameters and checkpoints for Aim."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..common.optional import require
from ..common.validation import check_number
from ._services import ServiceLogger

REMOTE = ("aim://", "ssh://")
FAILED = "failed"  # Aim knows only runs that go on and runs that ended, so a tag names those that failed
SUBSETS = {"subset": {"train": "train_", "val": "val_", "test": "test_"}}


class AimLogger(ServiceLogger):
    """Writes metrics, hyperparameters and checkpoints to an Aim repository (``pip install aim``).

    One run on rank 0, begun when something is logged. It is closed after each fit, validation or test, and continued by
    what is logged later. A run that failed has the tag ``failed``, until it ends well.

    Args:
        repo: Directory of the repository, or the address ``aim://host:port`` of a server. Default: the directory above
            the next ``.aim``, or the working directory.
        experiment: Experiment of the run. Default: Aim's, ``"default"``.
        system_tracking_interval: Seconds between records of CPU, memory and GPUs; None records none. Default: 10.
        log_system_params: Record packages, environment variables, git state and arguments. Default: True.
        capture_terminal_logs: Record what is printed. Default: True.
        run_name: What the run is called. Default: Aim makes up a name.
        run_hash: A run to continue. Default: a new one.
        context_prefixes: By context and its value, what a metric's name begins with; it is taken off, and the metric
            gets the context. Default: ``{"subset": {"train": "train_", "val": "val_", "test": "test_"}}``.
        context_postfixes: The same for the ends of names. Default: none.
        prefix: Put before every metric's name, as ``prefix-name``. Default: nothing.
        log_model: Copy checkpoints to ``artifacts_uri``: True those that are kept, when a fit ends; ``"all"`` each as
            it is saved. Default: False.
        artifacts_uri: Where checkpoints go, such as ``s3://bucket/folder``. Default: ``aim_artifacts`` in a local
            repository.
        strict: Let a failure end the run. Default: False, which warns once and goes on without this logger.

    Raises:
        ModuleNotFoundError: Aim is not installed.
        TypeError: An argument has the wrong type.
        ValueError: ``log_model`` needs an ``artifacts_uri``.
    """

    def __init__(
        self,
        repo: str | os.PathLike[str] | None = None,
        experiment: str | None = None,
        system_tracking_interval: float | None = 10,
        log_system_params: bool = True,
        capture_terminal_logs: bool = True,
        run_name: str | None = None,
        run_hash: str | None = None,
        context_prefixes: dict[str, dict[str, str]] | None = None,
        context_postfixes: dict[str, dict[str, str]] | None = None,
        prefix: str = "",
        log_model: bool | str = False,
        artifacts_uri: str | None = None,
        strict: bool = False,
    ) -> None:
        require("AimLogger", "aim", extra="aim")
        texts = {"experiment": experiment, "run_name": run_name, "run_hash": run_hash, "artifacts_uri": artifacts_uri}
        super().__init__(
            name=experiment, version=run_hash, prefix=prefix, log_model=log_model, strict=strict, texts=texts
        )
        if system_tracking_interval is not None:
            check_number("system_tracking_interval", system_tracking_interval, low=0)
        self._repo = None if repo is None else os.path.expandvars(os.path.expanduser(os.fspath(repo)))
        if log_model and artifacts_uri is None and self._is_remote:
            raise ValueError(f"log_model={log_model!r} needs artifacts_uri=... with the remote repository {repo!r}")
        self._run_name = run_name
        self._artifacts_uri = artifacts_uri
        self._prefixes = SUBSETS if context_prefixes is None else context_prefixes
        self._postfixes = context_postfixes or {}
        self._log_system_params = log_system_params
        self._options = {
            "system_tracking_interval": system_tracking_interval,
            "capture_terminal_logs": capture_terminal_logs,
        }

    @property
    def _is_remote(self) -> bool:
        return self._repo is not None and self._repo.startswith(REMOTE)

    @property
    def save_dir(self) -> str | None:
        """Directory of the repository; None if it is a server's, or left to Aim."""
        return None if self._is_remote else self._repo

    def _open(self) -> Any:
        from aim import Run

        if self._repo is not None and not self._is_remote:
            os.makedirs(self._repo, exist_ok=True)
        if self._version is None:
            run = Run(
                repo=self._repo, experiment=self._name, log_system_params=self._log_system_params, **self._options
            )
            self._version = run.hash
        else:
            run = self._reopen(Run)
        if self._run_name is not None:
            run.name = self._run_name
        return run

    def _reopen(self, run_class: Any) -> Any:
        from aim.sdk.errors import RunLockingError

        try:
            return run_class(self._version, repo=self._repo, **self._options)
        except RunLockingError:  # left by a process that was killed on another machine, where Aim cannot look for it
            return run_class(self._version, repo=self._repo, force_resume=True, **self._options)

    def _is_closed(self, run: Any) -> bool:
        return run._resources is None

    def _write_row(self, run: Any, row: dict[str, float], step: int) -> None:
        epoch = self._pop_epoch(row)
        for full_name, value in row.items():
            name, context = self._split_context(full_name)
            # A series has one type, which Aim changes with a warning where an integer comes before a float.
            run.track(float(value), name=name, step=step, epoch=epoch, context=context)

    def _split_context(self, name: str) -> tuple[str, dict[str, str]]:
        """Return a metric's name without what is its context, and the context."""
        context = {}
        for key, starts in self._prefixes.items():
            for value, start in starts.items():
                if name.startswith(start) and name != start:
                    name, context[key] = name.removeprefix(start), value
                    break  # what is left of the name is not taken apart once more
        for key, ends in self._postfixes.items():
            for value, end in ends.items():
                if name.endswith(end) and name != end:
                    name, context[key] = name.removesuffix(end), value
                    break
        return name, context

    def _write_params(self, run: Any, params: dict[str, Any]) -> None:
        for key, value in params.items():
            run.set(("hparams", key), value, strict=False)

    def _write_checkpoint(self, run: Any, path: str, aliases: list[str], facts: dict[str, Any]) -> None:
        if run.artifacts_uri is None:
            run.set_artifacts_uri(self._artifacts_uri or f"file://{Path(run.repo.root_path).absolute()}/aim_artifacts")
        name = Path(path).name
        run.log_artifacts(path, name=name, block=True)
        run.set(("checkpoints", name), {**facts, "aliases": aliases}, strict=False)

    def _close(self, run: Any, failed: bool) -> None:
        if failed and FAILED not in run.tags:
            run.add_tag(FAILED)
        elif not failed:
            if FAILED in run.tags:
                run.remove_tag(FAILED)
            run.report_successful_finish(block=False)
        run.close()
