"""Categories of Lightning's warnings."""

import warnings

import pytest


def test_warnings_that_may_be_wrong() -> None:
    from treadle.compat.fabric.utilities.warnings import PossibleUserWarning

    from treadle.utilities import disable_possible_user_warnings

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.warn("shown", PossibleUserWarning, stacklevel=1)
        disable_possible_user_warnings()
        warnings.warn("hidden", PossibleUserWarning, stacklevel=1)
    assert [str(warning.message) for warning in seen] == ["shown"]


def test_a_filter_of_lightnings_deprecations_is_not_one_of_others() -> None:
    from treadle.compat.fabric.utilities.rank_zero import LightningDeprecationWarning

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.simplefilter("error", LightningDeprecationWarning)
        warnings.warn("another library's", DeprecationWarning, stacklevel=1)
        with pytest.raises(LightningDeprecationWarning, match="old"):
            warnings.warn("old", LightningDeprecationWarning, stacklevel=1)
    assert [str(warning.message) for warning in seen] == ["another library's"]
