"""Configuration of a trial: the sweep's configuration with the trial's values and all defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ...cli.commands import dump_yaml
from ...cli.config import COMMAND_LINE, ConfigError, Value, resolve, to_plain
from ...cli.config.instantiate import check
from ...strategies.distributed import parse_devices
from .sweep_file import Sweep

if TYPE_CHECKING:
    from ...trainer.core import DataModule, TaskModule


class TrialConfigs:
    """Configurations of a sweep's trials."""

    def __init__(
        self,
        sweep: Sweep,
        program: str = "treadle fit",
        model: type[TaskModule] | None = None,
        data: type[DataModule] | None = None,
    ) -> None:
        self.sweep, self.program, self.model, self.data = sweep, program, model, data

    def check_all(self) -> None:
        """Validate every choice and both ends of every range, with all other parameters at their first value.

        Raises:
            ConfigError: If a configuration is invalid for a sweep.
        """
        first = {parameter.key: next(parameter.list_samples()) for parameter in self.sweep.parameters}
        problems = self._list_problems(first)
        if self._get_flags().get("fast_dev_run"):
            problems.append(
                f"{self.sweep.file}: trainer.fast_dev_run keeps no runs. Remove it; --dry-run checks a sweep."
            )
        if not problems:
            for parameter in self.sweep.parameters:
                for value in list(parameter.list_samples())[1:]:
                    problems += self._list_problems({**first, parameter.key: value})
        if problems:
            raise ConfigError(*dict.fromkeys(problems))

    def _list_problems(self, settings: Mapping[str, Value]) -> list[str]:
        try:
            check(resolve(self.sweep.base, settings), self.model, self.data)
        except ConfigError as error:
            return list(error.problems)
        return []

    def write(self, stored: Mapping[str, Any]) -> str:
        """Return the configuration of a trial, with all defaults, as YAML.

        Raises:
            ConfigError: If the values are not valid in combination.
        """
        settings = {parameter.key: parameter.to_value(stored[parameter.key]) for parameter in self.sweep.parameters}
        config = resolve(self.sweep.base, {**settings, "ckpt_path": Value("auto", COMMAND_LINE)})
        filled = check(config, self.model, self.data).resolve_defaults()
        return dump_yaml(filled, config.secrets, f"{self.program}, with all defaults")

    def _get_flags(self) -> dict[str, Any]:
        trainer = self.sweep.base.data.get("trainer")
        return to_plain(trainer) if trainer is not None and isinstance(trainer.data, dict) else {}

    def find_devices(self) -> tuple[int, list[str] | None]:
        """Return the number of processes per trial and the GPUs that trials may use.

        GPUs are named as in ``CUDA_VISIBLE_DEVICES``. The second value is None if trials use no GPUs.
        """
        flags = self._get_flags()
        gpus: list[str] | None = None
        if flags.get("accelerator") not in ("cpu", "mps"):
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            if visible is None:
                gpus = [str(number) for number in range(torch.cuda.device_count())] or None
            else:
                gpus = [name for name in visible.split(",") if name] or None
        devices = flags.get("devices", "auto")
        if gpus and devices in ("auto", -1, "-1"):
            return max(1, len(gpus) // self.sweep.processes), gpus
        # "cpu", because a trial sees only its own GPUs and checks their indices itself.
        try:
            return len(parse_devices("cpu", devices) or [0]), gpus
        except (TypeError, ValueError) as error:
            source = self.sweep.base.data["trainer"].data["devices"].source
            raise ConfigError(f"{source}: trainer.{error}") from None
