"""Callback that writes the configuration of a run to a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...callbacks import Callback
from ...common.remote_path import RemotePath, as_path
from ...engine.weights import make_parent
from .parser import LightningArgumentParser

if TYPE_CHECKING:
    from jsonargparse import Namespace

    from ...trainer import Trainer
    from ...trainer.core import TaskModule


class SaveConfigCallback(Callback):
    """Callback that writes the configuration into the Trainer's ``log_dir`` when a run starts.

    Without a ``log_dir``, the file is written into ``default_root_dir``.

    Args:
        parser: The parser that produced the configuration.
        config: The configuration to write.
        config_filename: Name of the file. Default: ``"config.yaml"``.
        overwrite: Whether to replace an existing file of that name. Default: False.
        multifile: Whether settings that were read from a file of their own, as with ``--model model.yaml``, are written
            to a file of that name. The destination must be a local folder. Default: False, a single file.
        save_to_log_dir: Whether to write the file. If False, a subclass must override ``save_config``. Default: True.

    Raises:
        ValueError: If ``save_to_log_dir`` is False and ``save_config`` is not overridden.

    Examples:
        >>> parser = LightningArgumentParser(dump_header=["my run"])
        >>> _ = parser.add_argument("--width", type=int, default=8)
        >>> callback = SaveConfigCallback(parser, parser.parse_args(["--width=4"]), config_filename="run.yaml")
        >>> print(callback.parser.dump(callback.config), end="")
        # my run
        width: 4
    """

    def __init__(
        self,
        parser: LightningArgumentParser,
        config: Namespace,
        config_filename: str = "config.yaml",
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        self.parser, self.config = parser, config
        self.config_filename, self.overwrite, self.multifile = config_filename, overwrite, multifile
        self.save_to_log_dir = save_to_log_dir
        self.already_saved = False
        if not save_to_log_dir and type(self).save_config is SaveConfigCallback.save_config:
            raise ValueError(
                "`save_to_log_dir=False` only makes sense with a subclass of SaveConfigCallback that defines "
                "save_config. Define it, or pass LightningCLI(save_config_callback=None)."
            )

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """On rank zero, write the configuration file and call `save_config`. Later calls do nothing.

        Args:
            trainer: Trainer of the run.
            pl_module: The task of the run.
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.

        Raises:
            RuntimeError: On every rank, if the file to write exists and ``overwrite`` is False.
        """
        if self.already_saved:
            return
        if self.save_to_log_dir:
            world = trainer.accelerator.world
            # Reading a logger's folder may create one, which only rank zero may do.
            folder = world.broadcast(trainer.log_dir or trainer.default_root_dir if world.is_main else None)
            path = as_path(folder) / self.config_filename
            if not self.overwrite and world.broadcast(path.is_file() if world.is_main else None):
                raise RuntimeError(
                    f"{path} already exists; it is probably from an earlier run. Aborting to avoid overwriting it. "
                    "Delete it, pass LightningCLI(save_config_kwargs={'overwrite': True}) to overwrite it, or pass "
                    "LightningCLI(save_config_callback=None) to save no configuration."
                )
            if trainer.is_global_zero:
                make_parent(path)
                if isinstance(path, RemotePath):
                    path.write_bytes(self.parser.dump(self.config, skip_unset=False).encode())
                else:
                    self.parser.save(
                        self.config, path, skip_unset=False, overwrite=self.overwrite, multifile=self.multifile
                    )
        if trainer.is_global_zero:
            self.save_config(trainer, pl_module, stage)
        self.already_saved = True

    def save_config(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> Any:
        """Save the configuration to a custom destination. Override this method; by default, it does nothing.

        The method runs only on rank zero, so it must not use collectives.

        Args:
            trainer: Trainer of the run. Its ``logger`` can record the text of ``self.parser.dump(self.config)``.
            pl_module: The task of the run.
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        """
