"""Fabric's warnings that may be wrong."""

import warnings


def test_warnings_that_may_be_wrong() -> None:
    from treadle.compat.fabric.utilities.warnings import PossibleUserWarning

    from treadle.utilities import disable_possible_user_warnings

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.warn("shown", PossibleUserWarning, stacklevel=1)
        disable_possible_user_warnings()
        warnings.warn("hidden", PossibleUserWarning, stacklevel=1)
    assert [str(warning.message) for warning in seen] == ["shown"]
