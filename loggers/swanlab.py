"""Metrics, hyperparameters and checkpoints for SwanLab."""

from __future__ import annotations

import glob
import os
import secrets
import string
from typing import Any

from ..common.optional import require
from ._services import ServiceLogger, check_options

# Which `swanlab.init` takes beside those of its signature, for older scripts.
OLD_NAMES = ("experiment_name", "notes", "logdir")


class SwanLabLogger(ServiceLogger):
    """Sends metrics, hyperparameters and checkpoints to SwanLab, or writes files (``pip install swanlab``).

    One run on rank 0, begun when something is logged. It stays open after a fit, so several fits, and
    ``logger.experiment`` after them, continue it; it ends with the process, with `finish`, or with a fit that failed,
    as ``crashed``. A run that you began is used, unless an ``id`` asks for another.

    SwanLab keeps the first value of a metric and step, and leaves out a later one. Offline, each beginning makes a
    folder ``run-TIME-ID``, also where a run is continued; ``swanlab sync --id ID FOLDER`` sends one into the same run.

    Args:
        project: Project of the run. Default: ``SWANLAB_PROJECT_NAME``, or ``"treadle_logs"``.
        workspace: Workspace of the run. Default: the account's.
        experiment_name: What the run is called. Default: SwanLab makes up a name.
        description: Text about the run. Default: none.
        log_dir: Directory of SwanLab's files. Default: ``save_dir/swanlog``.
        mode: ``"online"``, ``"offline"`` (only files; ``swanlab sync`` sends them), ``"local"`` (files for the
            dashboard, which needs ``swanlab[dashboard]``) or ``"disabled"``. Default: ``SWANLAB_MODE``, or online.
        save_dir: Directory above that of SwanLab's files. Default: the working directory.
        tags: Of the run. Default: none.
        id: The run's id; online, a run that has it is continued. Default: ``SWANLAB_RUN_ID``, or a new one.
        prefix: Put before every metric's name, as ``prefix-name``. Default: nothing.
        log_model: Save checkpoints with the run: True those that are kept, when a fit ends; ``"all"`` each as it is
            saved. Default: False.
        strict: Let a failure end the run. Default: False, which warns once and goes on without this logger.
        **kwargs: For ``swanlab.init``: ``group``, ``job_type``, ``public``, ``settings``, ``callbacks``, ...

    Raises:
        ModuleNotFoundError: Swanlab is not installed.
        TypeError: An argument has the wrong type, or ``swanlab.init`` does not take it.
    """

    closes_with_stage = False

    def __init__(
        self,
        project: str | None = None,
        workspace: str | None = None,
        experiment_name: str | None = None,
        description: str | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        mode: str | None = None,
        save_dir: str | os.PathLike[str] | None = ".",
        tags: list[str] | None = None,
        id: str | None = None,
        prefix: str = "",
        log_model: bool | str = False,
        strict: bool = False,
        **kwargs: Any,
    ) -> None:
        require("SwanLabLogger", "swanlab", extra="swanlab")
        texts = {"project": project, "workspace": workspace, "experiment_name": experiment_name, "mode": mode, "id": id}
        super().__init__(
            name=project or os.environ.get("SWANLAB_PROJECT_NAME") or "treadle_logs",
            version=id or os.environ.get("SWANLAB_RUN_ID"),
            prefix=prefix,
            log_model=log_model,
            strict=strict,
            texts=texts,
        )
        check_options("swanlab.init", kwargs, also=OLD_NAMES)
        self._save_dir = os.path.expandvars(os.path.expanduser(os.fspath(save_dir or ".")))
        given: dict[str, Any] = {"project": self._name, "workspace": workspace, "experiment_name": experiment_name}
        given |= {"description": description, "mode": mode, "tags": tags}
        self._options = {name: value for name, value in given.items() if value is not None}
        self._options["log_dir"] = os.path.join(self._save_dir, "swanlog") if log_dir is None else os.fspath(log_dir)
        self._options |= {"resume": "allow", **kwargs}

    @property
    def save_dir(self) -> str:
        """Directory above that of SwanLab's files."""
        return self._save_dir

    def _open(self) -> Any:
        import swanlab

        if swanlab.has_run():
            run = swanlab.get_run()
            if self._version == run.id or (self._version is None and not self._is_of_a_logger(run)):
                self._version = run.id
                return run
            run.finish()  # there is one at a time, and it can be continued by its id
        run = swanlab.init(id=self._version or _make_id(), **self._options)
        self._version = run.id
        return run

    def _is_closed(self, run: Any) -> bool:
        return not run.alive

    def _write_row(self, run: Any, row: dict[str, float], step: int) -> None:
        run.log(row, step=step)

    def _write_params(self, run: Any, params: dict[str, Any]) -> None:
        run.config.update(_name_none(params))

    def _write_checkpoint(self, run: Any, path: str, aliases: list[str], facts: dict[str, Any]) -> None:
        run.save(os.path.join(glob.escape(path), "**"), base_path=os.path.dirname(path), policy="now")
        run.config.update({f"checkpoints/{os.path.basename(path)}": _name_none({**facts, "aliases": aliases})})

    def _close(self, run: Any, failed: bool) -> None:
        if failed:
            run.finish(state="crashed", error="The fit, validation or test failed.")
        else:
            run.finish()


def _name_none(value: Any) -> Any:
    """Return a value with ``"None"`` for None, which SwanLab would keep as an empty mapping."""
    if isinstance(value, dict):
        return {key: _name_none(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_name_none(inner) for inner in value]
    return "None" if value is None else value


def _make_id() -> str:
    """Return an id like SwanLab's own, from the system and not from a generator that training uses."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(21))
