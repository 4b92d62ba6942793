"""Subcommands of a parser, and the annotation of a function that returns an object."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any


class Subcommands:
    """Subcommands of a `LightningArgumentParser`, each with its own parser."""

    def __init__(self, parser: Any) -> None:
        self.parser = parser

    def add_subcommand(self, name: str, parser: Any, help: str | None = None) -> None:
        """Add a subcommand.

        Args:
            name: The subcommand.
            parser: Its parser.
            help: Its description in the help.
        """
        parser.prog = f"{self.parser.prog} {name}"
        parser.env_prefix = f"{self.parser.env_prefix}_{name.upper()}_"
        parser.default_env = parser.default_env or self.parser.default_env
        parser.exit_on_error = self.parser.exit_on_error
        parser.parser_mode = self.parser.parser_mode if parser.parser_mode == "yaml" else parser.parser_mode
        if help:
            parser.description = help
        self.parser.subcommands[name] = parser


def signature_of_return(function: Callable[..., Any]) -> Any:
    """Return the annotation of a function's return value; None if there is none."""
    try:
        return typing.get_type_hints(function).get("return")
    except NameError:  # the name is imported for type checkers only
        return None
