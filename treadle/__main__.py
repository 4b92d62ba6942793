"""Entry point of `python -m treadle COMMAND ...`, which is the same as `treadle COMMAND ...`."""

import sys

from .cli import COMMANDS, main

__all__ = ["COMMANDS", "main"]

if __name__ == "__main__":
    sys.exit(main())
