"""`DirectoryLogger`: base class of loggers that write files to ``save_dir/name/version_N``."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from ..common.messages import name_type
from ..common.mirror import local_folder
from ..common.remote_path import RemotePath, as_path, is_url
from ..common.validation import check_text
from .logger import Logger, Params, process_rank
from .values import as_mapping, plain


class DirectoryLogger(Logger):
    r"""Base class of loggers that write files to ``save_dir/name/version_N``.

    If no version is passed, rank zero claims the next number by creating its directory. Two jobs never claim the same
    number.

    Args:
        save_dir: Parent directory of the experiments, or a URL such as ``s3://bucket/logs``. ``~`` and ``$VARIABLES``
            are expanded.
        name: Name of the experiment's directory in ``save_dir``. If None or ``""``, versions are written directly to
            ``save_dir``. Default: ``"treadle_logs"``.
        version: A number N for the directory ``version_N``, or the name of a directory. Default: the next unused
            number.
        prefix: Text before every metric's name, as ``prefix-name``. Default: none.

    Raises:
        TypeError, ValueError: If an argument is invalid.

    Examples:
        >>> import os, tempfile
        >>> from treadle.loggers import DirectoryLogger
        >>> class TextLogger(DirectoryLogger):
        ...     def log_metrics(self, metrics, step=None):
        ...         os.makedirs(self.log_dir, exist_ok=True)
        ...         with open(os.path.join(self.log_dir, "log.txt"), "a") as file:
        ...             file.write(f"{self.next_step(step)}: {metrics}\\n")
        ...     def log_hyperparams(self, params, metrics=None):
        ...         self.save_hyperparams(params)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     logger = TextLogger(folder, name="digits")
        ...     logger.log_metrics({"loss": 0.5})
        ...     print(os.path.relpath(logger.log_dir, folder), os.listdir(logger.log_dir))
        digits/version_0 ['log.txt']
    """

    NAME_HPARAMS_FILE = "hparams.yaml"
    LOGGER_JOIN_CHAR = "-"

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "treadle_logs",
        version: int | str | None = None,
        prefix: str = "",
    ) -> None:
        path = str(as_path(save_dir)) if is_url(save_dir) else os.fspath(save_dir)
        for argument, value in (("name", name), ("prefix", prefix)):
            if value is not None:
                check_text(argument, value)
        self._save_dir = os.path.expandvars(os.path.expanduser(path))
        self._name = name or ""
        self._version = check_version(version)
        self._prefix = f"{prefix}{self.LOGGER_JOIN_CHAR}" if prefix else ""
        self._experiment: Any = None
        self._hparams: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, which opens its own files."""
        return {**self.__dict__, "_experiment": None}

    @property
    def name(self) -> str:
        """Name of the experiment; ``""`` if versions are written directly to `save_dir`."""
        return self._name

    @property
    def save_dir(self) -> str:
        """Parent directory of all experiments."""
        return self._save_dir

    @property
    def root_dir(self) -> str:
        """Parent directory of all versions of this experiment."""
        return self._versions_dir

    @property
    def _versions_dir(self) -> str:
        name = self.name  # a subclass may override it
        return os.path.join(self._save_dir, name) if name else self._save_dir

    @property
    def version(self) -> int | str | None:
        """Version of the experiment. If no version was passed, the first access on rank zero claims the next number."""
        if self._version is None and process_rank() == 0:
            self._version = claim_version(self._versions_dir)
        return self._version

    @version.setter
    def version(self, version: int | str | None) -> None:
        check_version(version)
        if self._experiment is not None and version != self._version:
            raise ValueError(
                f"version={version!r} cannot replace version={self._version!r} while the logger's files are open. Call "
                "finalize() first."
            )
        self._version = version

    @property
    def log_dir(self) -> str | None:
        """Directory of this version; None if the version is not known on this rank."""
        version = self.version
        if version is None:
            return None
        folder = version if isinstance(version, str) else f"version_{version}"
        return os.path.join(self._versions_dir, folder) if folder else self._versions_dir

    @property
    def files_dir(self) -> Path:
        """Local folder with the files of `log_dir`: the directory itself or, if it is a URL, a local mirror of it."""
        return local_folder(str(self.log_dir))

    def save_hyperparams(self, params: Params) -> None:
        """Write hyperparameters to ``hparams.yaml`` in `log_dir`.

        Hyperparameters from earlier calls are kept, but a file from an earlier process is replaced. Only rank zero
        writes the file.

        Args:
            params: Settings by name, nested or not. `plain` converts their values.

        Raises:
            TypeError: If ``params`` is invalid.
        """
        self._hparams.update(plain(as_mapping(params)))
        directory = self.log_dir
        if process_rank() != 0 or directory is None:
            return
        import yaml

        folder = self.files_dir
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / self.NAME_HPARAMS_FILE
        part = folder / f"{self.NAME_HPARAMS_FILE}.tmp"
        with part.open("w", encoding="utf-8") as file:
            yaml.safe_dump(self._hparams, file, sort_keys=False, allow_unicode=True)
        os.replace(part, target)


def check_version(version: int | str | None) -> int | str | None:
    """Return a version unchanged if it is valid: a number of at least 0, the name of a directory, or None."""
    if version is not None and (isinstance(version, bool) or not isinstance(version, int | str)):
        raise TypeError(f"version={version!r} must be an integer, a directory name or None, not {name_type(version)}.")
    if isinstance(version, int) and version < 0:
        raise ValueError(f"version={version} must be at least 0. Pass None for the next free number.")
    return version


def claim_version(root_dir: str) -> int:
    """Create ``version_N`` in ``root_dir`` for the first N above all existing versions, and return N.

    Args:
        root_dir: Directory or URL; created if missing.
    """
    root = as_path(root_dir)
    if isinstance(root, Path):
        os.makedirs(root, exist_ok=True)
    names = root.names() if isinstance(root, RemotePath) else os.listdir(root)
    existing_versions = [int(match[1]) for entry in names if (match := re.fullmatch(r"version_(\d+)", entry))]
    version = max(existing_versions, default=-1) + 1
    while True:
        # Exclusive creation is the claim: with a check before the creation, two jobs could take the same number.
        with contextlib.suppress(FileExistsError):
            if isinstance(root, RemotePath):  # a folder exists once it contains an object
                (root / f"version_{version}" / ".claim").write_bytes(b"", exclusive=True)
            else:
                os.mkdir(root / f"version_{version}")
            return version
        version += 1
