"""Implementations of the commands `treadle fit`, `runs`, `export` and others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from . import stages
    from .argument_parser import CommandParser
    from .command_line import print_on_rank_zero, report_error
    from .config_help import describe_target
    from .runs import format_parameter, format_parameters, shorten_keys
    from .stages import Session
    from .yaml_dump import dump_yaml

__getattr__, __dir__, __all__ = lazy_exports(__name__)
