"""`LightningCLI`: command line built from the arguments of a Trainer, a task and a data module."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import update_wrapper
from types import MethodType
from typing import Any

import yaml
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...common import __version__
from ...common.messages import warn
from ...engine import seed_everything
from ...trainer import Trainer
from ...trainer.core import (
    CLASS_PATH,
    INSTANTIATOR,
    DataModule,
    TaskModule,
    giving_settings,
    instantiate_module,
    overrides,
    read_hyperparameters,
)
from .optimizers import LRSchedulerTypeTuple, ReduceLROnPlateau, instantiate_class
from .parser import LightningArgumentParser
from .save_config import SaveConfigCallback

from jsonargparse import ActionConfigFile, Namespace, class_from_function  # isort: skip  # `.parser` checks it first

ArgsType = list[str] | dict[str, Any] | Namespace | None


class LightningCLI:
    """Command line built from the arguments of a Trainer, a task and a data module.

    The constructor parses the command line, builds the objects and, unless ``run`` is False, runs the subcommand.

    Args:
        model_class: The task's class, or a function that returns a task. Default: None, which requires the settings to
            name the class.
        datamodule_class: The data module's class, or a function that returns a data module. Default: None, which allows
            the settings to name the class.
        save_config_callback: Class of the callback that saves the configuration. None disables saving, as does
            ``fast_dev_run``. Default: `SaveConfigCallback`.
        save_config_kwargs: Further arguments of ``save_config_callback``. Default: None, which passes no further
            arguments.
        trainer_class: A subclass of Trainer, or a function that returns a Trainer. Default: Trainer.
        trainer_defaults: Defaults for the Trainer's arguments. ``callbacks`` in this dict are added to those in the
            settings. Default: None, which keeps the Trainer's own defaults.
        seed_everything_default: Default of ``--seed_everything``: a seed, True for the default seed of
            `seed_everything`, or False to leave the RNG state unchanged. Default: True.
        parser_kwargs: Arguments of ``parser_class``. Arguments of a subcommand's parser are nested under the
            subcommand's name. Default: None, which passes no arguments.
        parser_class: The parser's class. Default: `LightningArgumentParser`.
        subclass_mode_model: Whether the settings may name a subclass of ``model_class``. Default: False.
        subclass_mode_data: Whether the settings may name a subclass of ``datamodule_class``. Default: False.
        args: The command line as a list, or settings as a dict or namespace. Default: None, which reads ``sys.argv``.
        run: Whether to run the subcommand that the command line names. If False, the command line has no subcommands,
            and the objects are only built. Default: True.
        auto_configure_optimizers: Whether the optimizer and scheduler in the settings replace the task's
            ``configure_optimizers``. An optimizer or scheduler that is linked to an argument never replaces it.
            Default: True.
        load_from_checkpoint_support: Whether ``save_hyperparameters`` saves the settings instead of the arguments.
            `TaskModule.load_from_checkpoint` can then build the objects in the arguments, such as an encoder, too.
            Default: True.
        save_config_overwrite: Lightning 1's name for the argument ``overwrite`` of ``save_config_callback``. Default:
            None, which does not pass ``overwrite``.

    Raises:
        ModuleNotFoundError: When the class is imported, if jsonargparse is not installed.

    Attributes:
        parser: The parser of the command line.
        config: The parsed configuration. The settings of a subcommand are nested under the subcommand's name.
        config_init: A copy of ``config`` with built objects in place of their settings.
        model, datamodule, trainer: The task, data module and Trainer that were built. ``datamodule`` is None if there
            is no data module.
        subcommand: Name of the subcommand to run; None with ``run=False``.

    Examples:
        >>> import torch
        >>> from treadle import TaskModule
        >>> class Model(TaskModule):
        ...     def __init__(self, width: int = 8):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(width, 1)
        >>> cli = LightningCLI(Model, args=["--model.width=4", "--seed_everything=1"], run=False)
        >>> cli.model.layer.in_features
        4
    """

    def __init__(
        self,
        model_class: type[TaskModule] | Callable[..., TaskModule] | None = None,
        datamodule_class: type[DataModule] | Callable[..., DataModule] | None = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None,
        trainer_class: type[Trainer] | Callable[..., Trainer] = Trainer,
        trainer_defaults: dict[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: dict[str, Any] | None = None,
        parser_class: type[LightningArgumentParser] = LightningArgumentParser,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: ArgsType = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
        load_from_checkpoint_support: bool = True,
        *,
        save_config_overwrite: bool | None = None,
    ) -> None:
        self.save_config_callback = save_config_callback
        self.save_config_kwargs = dict(save_config_kwargs or {})
        if save_config_overwrite is not None:
            self.save_config_kwargs["overwrite"] = save_config_overwrite
        self.trainer_class = trainer_class
        self.trainer_defaults = trainer_defaults or {}
        self.seed_everything_default = seed_everything_default
        self.parser_kwargs = parser_kwargs or {}
        self.parser_class = parser_class
        self.auto_configure_optimizers = auto_configure_optimizers
        self.load_from_checkpoint_support = load_from_checkpoint_support
        self.model_class, self.datamodule_class = model_class, datamodule_class
        self.subclass_mode_model = model_class is None or subclass_mode_model
        self.subclass_mode_data = datamodule_class is None or subclass_mode_data
        self._subcommand_method_arguments: dict[str, list[str]] = {}
        self._subcommand_parsers: dict[str, LightningArgumentParser] = {}

        commands = self.subcommands()
        main_kwargs = {name: value for name, value in self.parser_kwargs.items() if name not in commands}
        subparser_kwargs = {name: value for name, value in self.parser_kwargs.items() if name in commands}
        self.setup_parser(run, main_kwargs, subparser_kwargs)
        self.parse_arguments(self.parser, args)
        self._parse_ckpt_path()
        self.subcommand: str | None = self.config["subcommand"] if run else None
        self._set_seed()
        self.before_instantiate_classes()
        self.instantiate_classes()
        self.after_instantiate_classes()
        if self.subcommand is not None:
            self._run_subcommand(self.subcommand)

    # -- the parser --------------------------------------------------------------------------------------------------

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Return a parser with the option ``--config``.

        Args:
            **kwargs: Arguments of ``parser_class``.
        """
        kwargs.setdefault("dump_header", [f"treadle=={__version__}"])
        parser = self.parser_class(**kwargs)
        parser.add_argument("-c", "--config", action=ActionConfigFile, help="a YAML or JSON file with settings")
        return parser

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Create ``self.parser`` with its subcommands or its arguments.

        Args:
            add_subcommands: Whether each subcommand gets its own parser with the arguments. If False, the arguments are
                added to the main parser.
            main_kwargs: Constructor arguments of the main parser.
            subparser_kwargs: Constructor arguments of each subcommand's parser, keyed by the subcommand's name.
        """
        self.parser = self.init_parser(**main_kwargs)
        if add_subcommands:
            self._add_subcommands(self.parser, **subparser_kwargs)
        else:
            self._add_arguments(self.parser)

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the option ``--seed_everything``.

        Args:
            parser: Parser to extend.
        """
        parser.add_argument(
            "--seed_everything",
            type=bool | int,
            default=self.seed_everything_default,
            help="the seed of all random number generators; true for the default seed, false for none",
        )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the arguments of the Trainer, the task and the data module.

        Args:
            parser: Parser to extend.
        """
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        parser.set_defaults({f"trainer.{name}": v for name, v in self.trainer_defaults.items() if name != "callbacks"})
        parser.add_lightning_class_args(self.model_class or TaskModule, "model", self.subclass_mode_model)
        # If there is no data module class, the task may have its own dataloaders.
        required = self.datamodule_class is not None
        parser.add_lightning_class_args(self.datamodule_class or DataModule, "data", self.subclass_mode_data, required)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add custom arguments and links. Override this method; by default, it does nothing.

        Args:
            parser: Parser to extend.
        """

    def _add_arguments(self, parser: LightningArgumentParser) -> None:
        self.add_default_arguments_to_parser(parser)
        self.add_core_arguments_to_parser(parser)
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers:
            if not parser._optimizers:
                parser.add_optimizer_args((Optimizer,))
            if not parser._lr_schedulers:
                parser.add_lr_scheduler_args(LRSchedulerTypeTuple)
        self.link_optimizers_and_lr_schedulers(parser)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the subcommands, each with the arguments of its Trainer method that are not command-line options."""
        return {
            "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"},
            "validate": {"model", "dataloaders", "datamodule"},
            "test": {"model", "dataloaders", "datamodule"},
            "predict": {"model", "dataloaders", "datamodule"},
        }

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        added = parser.add_subcommands()
        trainer_class = self.trainer_class
        if not isinstance(trainer_class, type):
            trainer_class = class_from_function(trainer_class)
        for name in self.subcommands():
            description = (getattr(trainer_class, name).__doc__ or "").strip().partition("\n")[0]
            options = {"description": description, **kwargs.get(name, {})}
            self._subcommand_parsers[name] = self._prepare_subcommand_parser(trainer_class, name, **options)
            added.add_subcommand(name, self._subcommand_parsers[name], help=description)

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = self.init_parser(**kwargs)
        self._add_arguments(parser)
        skip: set[str | int] = set(self.subcommands()[subcommand])
        self._subcommand_method_arguments[subcommand] = parser.add_method_arguments(klass, subcommand, skip=skip)
        return parser

    @staticmethod
    def link_optimizers_and_lr_schedulers(parser: LightningArgumentParser) -> None:
        """Link optimizers and schedulers to the arguments named by ``link_to``, unless it is ``"AUTOMATIC"``.

        Args:
            parser: Parser with the optimizers and schedulers.
        """
        for key, (classes, link_to) in {**parser._optimizers, **parser._lr_schedulers}.items():
            if link_to != "AUTOMATIC":
                compute = None if isinstance(classes, tuple) else _make_class_path_adder(classes)
                parser.link_arguments(key, link_to, compute_fn=compute)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse a command line, or settings, into ``self.config``.

        Args:
            parser: Parser whose options are read.
            args: The command line as a list, or settings as a dict or namespace. None reads ``sys.argv``.
        """
        if args is not None and len(sys.argv) > 1:
            warn(
                f"LightningCLI's args parameter replaces the command line, so {sys.argv[1:]} is ignored. Use only one "
                "of them."
            )
        if isinstance(args, dict | Namespace):
            self.config = parser.parse_object(args)
        else:
            self.config = parser.parse_args(args)

    def _parse_ckpt_path(self) -> None:
        """Override the model's settings with the hyperparameters saved in a local checkpoint at ``ckpt_path``."""
        subcommand = self.config.get("subcommand")
        path = self.config[subcommand].get("ckpt_path") if subcommand else None
        if not path or not os.path.exists(path):
            return
        saved = read_hyperparameters(path)
        settings: Any = {name: value for name, value in saved.items() if name not in (CLASS_PATH, INSTANTIATOR)}
        if not settings:
            return
        if self.subclass_mode_model:
            saved.setdefault(CLASS_PATH, self.config[subcommand].model.class_path)
        if CLASS_PATH in saved:
            settings = {"class_path": saved[CLASS_PATH], "dict_kwargs": settings}
        cls = self.model_class or TaskModule
        try:
            instantiate_module(cls if isinstance(cls, type) else class_from_function(cls), saved, build=False)
            self.config = self.parser.parse_object({subcommand: {"model": settings}}, self.config)
        except ValueError as error:
            self.parser.error(f"Parsing of ckpt_path hyperparameters failed: {path}: {error}")
        except SystemExit:
            print(f"Parsing of ckpt_path hyperparameters failed: {path}", file=sys.stderr)
            raise

    def _parser(self, subcommand: str | None) -> LightningArgumentParser:
        return self.parser if subcommand is None else self._subcommand_parsers[subcommand]

    def _get(self, config: Namespace, key: str, default: Any = None) -> Any:
        return config.get(str(self.subcommand), config).get(key, default)

    def _set_seed(self) -> None:
        seed = self._get(self.config, "seed_everything")
        if seed is False:
            return
        seed = seed_everything(workers=True) if seed is True else seed_everything(seed, workers=True)
        self.config.get(str(self.subcommand), self.config)["seed_everything"] = seed

    # -- the objects -------------------------------------------------------------------------------------------------

    def before_instantiate_classes(self) -> None:
        """Run custom code before the objects are built. By default, do nothing."""

    def instantiate_classes(self) -> None:
        """Build the task, the data module and the Trainer."""
        instantiators = self._add_instantiators() if self.load_from_checkpoint_support else ()
        self.config_init = self.parser.instantiate(self.config, instantiators=instantiators or ())
        self.datamodule = self._get(self.config_init, "data")
        self.model = self._get(self.config_init, "model")
        self._add_configure_optimizers_method_to_model(self.subcommand)
        self.trainer = self.instantiate_trainer()

    def _add_instantiators(self) -> Any:
        """Return what builds the task and the data module; a subclass that returns None lets them save arguments."""
        model, data = self.model_class or TaskModule, self.datamodule_class or DataModule
        instantiators = [
            (self._make_instantiator("model"), model, self.subclass_mode_model),
            (self._make_instantiator("data"), data, self.subclass_mode_data),
        ]
        return [entry for entry in instantiators if isinstance(entry[1], type)]  # a function's object saves arguments

    def _make_instantiator(self, key: str) -> Callable[..., Any]:
        """Return a function that builds the task or data module and passes it its settings as hyperparameters."""
        text = self._parser(self.subcommand).dump(
            self.config.get(str(self.subcommand), self.config),
            format="yaml",
            skip_link_targets=False,
            skip_unset=False,
        )
        settings = yaml.safe_load(text).get(key) or {}
        if "class_path" in settings:
            arguments = {**settings.get("init_args", {}), **settings.get("dict_kwargs", {})}
            settings = {CLASS_PATH: settings["class_path"], **arguments}

        def build(cls: type, *args: Any, applied_instantiation_links: dict[str, Any], **kwargs: Any) -> Any:
            for target, value in applied_instantiation_links.items():
                owner, _, path = target.partition(".")
                if owner == key:
                    *parents, name = path.removeprefix("init_args.").split(".")
                    place = settings
                    for parent in parents:
                        place = place[parent]
                    place[name] = value
            with giving_settings(cls, settings):
                return cls(*args, **kwargs)

        return build

    def after_instantiate_classes(self) -> None:
        """Run custom code after the objects are built. By default, do nothing."""

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the Trainer from the configuration and return it.

        Args:
            **kwargs: Arguments of the Trainer that override the configuration.
        """
        parser = self._parser(self.subcommand)
        extra_callbacks = [self._get(self.config_init, key) for key in parser.callback_keys]
        arguments = {**self._get(self.config_init, "trainer", {}), **kwargs}
        return self._instantiate_trainer(arguments, extra_callbacks)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Any]) -> Trainer:
        if "callbacks" not in config:
            warn(
                f"`{self.trainer_class.__qualname__}` class does not expose the `callbacks` argument, so callbacks in "
                "the settings, trainer_defaults and save_config_callback are not used. Add it to __init__."
            )
            return self.trainer_class(**config)
        config["callbacks"] = [
            *_make_list(config["callbacks"]),
            *callbacks,
            *(
                instantiate_class((), callback) if isinstance(callback, dict) else callback
                for callback in _make_list(self.trainer_defaults.get("callbacks"))
            ),
        ]
        if self.save_config_callback is not None and not config.get("fast_dev_run", False):
            settings = self.config.get(str(self.subcommand), self.config)
            parser = self._parser(self.subcommand)
            config["callbacks"].append(self.save_config_callback(parser, settings, **self.save_config_kwargs))
        return self.trainer_class(**config)

    @staticmethod
    def configure_optimizers(
        lightning_module: TaskModule, optimizer: Optimizer, lr_scheduler: LRScheduler | None = None
    ) -> Any:
        """Return the optimizer and scheduler in the form that a task's ``configure_optimizers`` returns.

        Args:
            lightning_module: The task.
            optimizer: The optimizer that the settings name.
            lr_scheduler: The scheduler that the settings name. Default: None.
        """
        if lr_scheduler is None:
            return optimizer
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            schedule = {"scheduler": lr_scheduler, "monitor": lr_scheduler.monitor}
            return {"optimizer": optimizer, "lr_scheduler": schedule}
        return [optimizer], [lr_scheduler]

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        """Replace the task's ``configure_optimizers`` if there are settings of an ``"AUTOMATIC"`` optimizer."""
        if not self.auto_configure_optimizers:
            return
        parser = self._parser(subcommand)
        optimizers = [key for key, (_, link_to) in parser._optimizers.items() if link_to == "AUTOMATIC"]
        schedulers = [key for key, (_, link_to) in parser._lr_schedulers.items() if link_to == "AUTOMATIC"]
        if not optimizers:
            return
        if len(optimizers) > 1 or len(schedulers) > 1:
            raise ValueError(
                f"{', '.join(optimizers + schedulers)}: only one optimizer and one scheduler can be 'AUTOMATIC'. Pass "
                "link_to=... to add_optimizer_args and add_lr_scheduler_args, and define configure_optimizers."
            )
        optimizer = self._get_class_settings(parser._optimizers[optimizers[0]][0], optimizers[0])
        if not optimizer:
            return
        scheduler = None
        if schedulers:
            scheduler = self._get_class_settings(parser._lr_schedulers[schedulers[0]][0], schedulers[0])
        if overrides(self.model, "configure_optimizers"):
            warn(
                f"`{type(self.model).__name__}.configure_optimizers` will be overridden by "
                f"`{type(self).__name__}.configure_optimizers`, because --{optimizers[0]} is set. Remove that option, "
                "or pass LightningCLI(auto_configure_optimizers=False)."
            )
        configure = self.configure_optimizers

        def configure_optimizers(task: TaskModule) -> Any:
            # Built here and not with the task, because the task's parameters may have been moved or created only now.
            built = instantiate_class(task.parameters(), optimizer)
            return configure(task, built, instantiate_class(built, scheduler) if scheduler else None)

        update_wrapper(configure_optimizers, configure)
        self.model.configure_optimizers = MethodType(configure_optimizers, self.model)

    def _get_class_settings(self, classes: Any, key: str) -> dict[str, Any] | None:
        settings = self._get(self.config_init, key)
        return settings if isinstance(classes, tuple) else _make_class_path_adder(classes)(settings)

    # -- the run -----------------------------------------------------------------------------------------------------

    def _run_subcommand(self, subcommand: str) -> None:
        prepare, complete = (getattr(self, f"{moment}_{subcommand}", None) for moment in ("before", "after"))
        if callable(prepare):
            prepare()
        run = getattr(self, subcommand, None) or getattr(self.trainer, subcommand)
        run(**self._prepare_subcommand_kwargs(subcommand))
        if callable(complete):
            complete()

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        settings = self.config_init[subcommand]
        arguments = {name: settings[name] for name in self._subcommand_method_arguments[subcommand]}
        arguments["model"] = self.model
        if self.datamodule is not None:
            arguments["datamodule"] = self.datamodule
        return arguments


def _make_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _make_class_path_adder(cls: type) -> Callable[[Namespace], dict[str, Any]]:
    def add_class_path(init_args: Namespace) -> dict[str, Any]:
        return {"class_path": f"{cls.__module__}.{cls.__name__}", "init_args": init_args.as_dict()}

    return add_class_path
