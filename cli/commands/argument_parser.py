"""Argument parser of a command with options of its own."""

from __future__ import annotations

import re
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import NoReturn

from ...common.messages import nearest


class CommandParser(ArgumentParser):
    """Argument parser that raises a ValueError for an invalid command line instead of ending the program.

    Args:
        program: The command, such as ``"treadle export"``.
        description: The text of its help, whose lines are kept.
    """

    def __init__(self, program: str, description: str) -> None:
        super().__init__(
            program, description=description, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False
        )
        self.add_argument("--json", action="store_true", help="print the result as a JSON object, and nothing else")

    def error(self, message: str) -> NoReturn:
        """Raise a ValueError with argparse's message and, for an unknown option, the closest valid one."""
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        hint = nearest(unknown[1], self._option_string_actions.keys() - {"--help"}) if unknown else ""
        raise ValueError(f"{message}.{hint}" if hint else message)
