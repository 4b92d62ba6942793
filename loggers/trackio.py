"""`TrackioLogger`: writes metrics, hyperparameters and checkpoints to Trackio."""

from __future__ import annotations

import os
import re
import secrets
from typing import Any

from ..common.optional import require
from .service_logger import ServiceLogger, check_options


class TrackioLogger(ServiceLogger):
    """Logger that writes metrics, hyperparameters and checkpoints to Trackio (``pip install trackio``).

    Rank zero begins a run on first use. The run is closed after each stage and reopened on the next use. Trackio turns
    storage errors into warnings, even if ``strict`` is True.

    Args:
        project: Project of the run. Default: ``"treadle_logs"``.
        name: Name of the run, which is also its ``version``. Default: generated.
        prefix: Text before every metric's name, as ``prefix-name``. Default: none.
        log_model: Copy checkpoints to Trackio's artifacts; those at a URL are skipped. ``"all"`` copies each checkpoint
            when it is saved. True copies the kept checkpoints at the end of the fit or, with
            ``ModelCheckpoint(save_top_k=-1)``, each checkpoint when it is saved. Default: False.
        strict: Raise errors from the logger instead of disabling it with a warning. Default: False.
        **kwargs: Arguments of ``trackio.init``, such as ``space_id`` and ``server_url``. ``resume="allow"`` continues
            the latest run with this ``name``, if there is one. Without ``resume``, the logger begins a new run.

    Raises:
        ModuleNotFoundError: If Trackio is not installed.
        TypeError, ValueError: If an argument is invalid.

    Examples:
        >>> from treadle.loggers import TrackioLogger
        >>> logger = TrackioLogger("digits", name="baseline")
        >>> logger.name, logger.version
        ('digits', 'baseline')
    """

    def __init__(
        self,
        project: str = "treadle_logs",
        name: str | None = None,
        prefix: str = "",
        log_model: bool | str = False,
        strict: bool = False,
        **kwargs: Any,
    ) -> None:
        require("TrackioLogger", "trackio", extra="trackio")
        texts = {"project": project, "name": name}
        super().__init__(project, name, texts, prefix=prefix, log_model=log_model, strict=strict)
        check_options("trackio.init", kwargs)
        self._options = kwargs
        self._begun = False
        self._has_rows = False

    def _open(self) -> Any:
        import trackio

        # Trackio draws its names from Python's generator, so runs with the same seed would get the same name.
        name = str(self._version or "") or f"run-{secrets.token_hex(4)}"
        options = {**self._options, "resume": "must"} if self._begun else self._options
        run = trackio.init(project=str(self._name), name=name, **options)
        kept = self._read_config(run)
        run.config.update({key: value for key, value in kept.items() if not key.startswith("_")})
        self._version, self._begun, self._has_rows = run.name, True, False
        return run

    def _read_config(self, run: Any) -> dict[str, Any]:
        """Return the saved configuration of a continued local run, which Trackio would replace with this process's."""
        from trackio import Api

        if not run._is_local:
            return {}
        try:
            runs = Api().runs(str(self._name))
        except ValueError:  # the project does not exist yet
            return {}
        return next((found.config or {} for found in runs if found.id == run.id), {})

    def _is_closed(self, run: Any) -> bool:
        return bool(run._stop_flag.is_set())

    def _write_row(self, run: Any, row: dict[str, float], step: int) -> None:
        run.log(row, step=step)
        self._has_rows = True

    def _write_params(self, run: Any, params: dict[str, Any]) -> None:
        if all(key in run.config and run.config[key] == value for key, value in params.items()):
            return
        if self._has_rows:  # Trackio writes the configuration only with the first row
            run.finish()
            run = self.experiment
        run.config.update(params)

    def _write_checkpoint(self, run: Any, path: str, aliases: list[str], facts: dict[str, Any]) -> None:
        from trackio import Artifact

        # Artifact names may contain no other characters.
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", f"model-{self._version}")
        artifact = Artifact(name, type="model", metadata=facts)
        (artifact.add_dir if os.path.isdir(path) else artifact.add_file)(path)
        run.log_artifact(artifact, aliases=aliases)

    def _close(self, run: Any, failed: bool) -> None:
        if failed:
            from trackio import AlertLevel

            run.alert("Run failed", level=AlertLevel.ERROR)
        run.finish()
