"""Subcommands of a `LightningArgumentParser`."""

from __future__ import annotations

from typing import Any


class Subcommands:
    """Subcommands of a `LightningArgumentParser`, each with its own parser."""

    def __init__(self, parser: Any) -> None:
        self.parser = parser

    def add_subcommand(self, name: str, parser: Any, help: str | None = None) -> None:
        """Add a subcommand with its own parser, which adopts settings of the main parser, such as ``exit_on_error``."""
        parser.prog = f"{self.parser.prog} {name}"
        parser.env_prefix = f"{self.parser.env_prefix}_{name.upper()}_"
        parser.default_env = parser.default_env or self.parser.default_env
        parser.exit_on_error = self.parser.exit_on_error
        parser.parser_mode = self.parser.parser_mode if parser.parser_mode == "yaml" else parser.parser_mode
        if help:
            parser.description = help
        self.parser.subcommands[name] = parser
