"""Lightning's category of warnings that may be wrong. Treadle does not issue such warnings, but libraries do."""

from __future__ import annotations

import warnings


class PossibleUserWarning(UserWarning):
    """Warning about something that may be intended."""


def disable_possible_user_warnings(module: str = "") -> None:
    """Ignore all warnings of category `PossibleUserWarning`.

    Args:
        module: A regular expression for the beginning of module names. Default: all modules.
    """
    warnings.filterwarnings("ignore", category=PossibleUserWarning, module=module)
