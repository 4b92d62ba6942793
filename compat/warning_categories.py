"""`PossibleUserWarning`, Lightning's category of warnings about possible mistakes."""

from __future__ import annotations

import warnings


class PossibleUserWarning(UserWarning):
    """Warning about something that may be intended."""


def disable_possible_user_warnings(module: str = "") -> None:
    """Ignore warnings of category `PossibleUserWarning`, by default from all modules."""
    warnings.filterwarnings("ignore", category=PossibleUserWarning, module=module)
