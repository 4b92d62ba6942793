"""Subcommands of a `LightningArgumentParser`."""

from __future__ import annotations

from typing import Any


class Subcommands:
    """Subcommands of a `LightningArgumentParser`, each with its own parser."""

    def __init__(self, parser: Any) -> None:
        self.parser = parser

    def add_subcommand(self, name: str, parser: Any, help: str | None = None) -> None:
        """Add a subcommand with its own parser.

        Args:
            name: Name of the subcommand on the command line.
            parser: Parser of the subcommand's options. The main parser determines its name, environment prefix and
                ``exit_on_error``, its ``default_env`` if True, and its ``parser_mode`` unless the subcommand's parser
                has another mode than ``"yaml"``.
            help: The subcommand's description in the help. Default: None, the description of ``parser``.
        """
        parser.prog = f"{self.parser.prog} {name}"
        parser.env_prefix = f"{self.parser.env_prefix}_{name.upper()}_"
        parser.default_env = parser.default_env or self.parser.default_env
        parser.exit_on_error = self.parser.exit_on_error
        parser.parser_mode = self.parser.parser_mode if parser.parser_mode == "yaml" else parser.parser_mode
        if help:
            parser.description = help
        self.parser.subcommands[name] = parser
