"""The one vocabulary of argument checks."""

import math
import re

import pytest
from treadle.common import validation as v

WRONG = [
    (v.check_bool, ("verbose", "False"), TypeError, "verbose='False' must be True or False, not a str."),
    (v.check_bool_or_word, ("save_last", "lnk", ["link"]), ValueError, "Did you mean 'link'?"),
    (v.check_int, ("steps", 0, 1), ValueError, "steps=0 must be an integer of at least 1."),
    (v.check_int, ("steps", 1.5, 1), ValueError, "steps=1.5 must be an integer of at least 1."),
    (v.check_int, ("steps", True, 1), ValueError, "steps=True must be an integer"),
    (v.check_int, ("steps", -1, 0, "means never"), ValueError, "at least 0 (0 means never)."),
    (v.check_number, ("decay", "1"), TypeError, "decay='1' must be a number, not a str."),
    (v.check_number, ("decay", math.nan), ValueError, "decay=nan must be a number."),
    (v.check_number, ("decay", -1, 0.0), ValueError, "decay=-1 must be a number of at least 0."),
    (v.check_positive, ("clip", 0), ValueError, "clip=0 must be a number above 0."),
    (v.check_positive, ("clip", "1"), ValueError, "clip='1' must be a number above 0."),
    (v.check_positive, ("clip", math.nan, "or None"), ValueError, "clip=nan must be a number above 0, or None."),
    (v.check_text, ("name", 3), TypeError, "name=3 must be a string, not an int."),
    (v.check_path, ("dirpath", 3), TypeError, "dirpath=3 must be a path, not an int."),
    (v.check_monitor, ("",), ValueError, "monitor='' must be the name of a logged value"),
    (v.check_monitor, (3,), TypeError, "monitor=3 must be the name of a logged value"),
    (v.choose, ("mode", "mim", ("min", "max")), ValueError, "mode='mim' is not one of min, max. Did you mean 'min'?"),
]


@pytest.mark.parametrize(("check", "arguments", "error", "words"), WRONG)
def test_what_is_refused(check, arguments, error, words):
    with pytest.raises(error, match=re.escape(words)):
        check(*arguments)
