"""Lightning's category of warnings that may be wrong. Treadle warns with none of it; libraries do."""

from __future__ import annotations

import warnings


class PossibleUserWarning(UserWarning):
    """Warns of what may be meant as it is."""


def disable_possible_user_warnings(module: str = "") -> None:
    """Show no `PossibleUserWarning` any more.

    Args:
        module: a regular expression; only warnings of modules whose names begin so. By default all.
    """
    warnings.filterwarnings("ignore", category=PossibleUserWarning, module=module)
