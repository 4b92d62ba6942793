"""Construction of an object, such as a task, from its LightningCLI settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .parser import LightningArgumentParser


def instantiate_module(class_type: type, config: Mapping[str, Any]) -> Any:
    """Build an instance of a class from its settings.

    Args:
        class_type: The class to instantiate or, if ``config`` names a subclass, its base class.
        config: The arguments by name. The key ``"_class_path"`` may name a subclass.

    Returns:
        An instance of ``class_type`` or of the named subclass.

    Raises:
        ConfigError: If the settings are invalid.
    """
    parser = LightningArgumentParser(exit_on_error=False)
    settings = dict(config)
    class_path = settings.pop("_class_path", None)
    if class_path is not None:
        parser.add_subclass_arguments(class_type, "module", required=True)
        settings = {"class_path": class_path, "init_args": settings}
    else:
        parser.add_class_arguments(class_type, "module")
    return parser.instantiate_classes(parser.parse_object({"module": settings})).module
