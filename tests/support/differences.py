"""What differs between the results of two runs."""

import itertools
import math

import numpy as np
import torch


def whole(tensor):
    """A sharded tensor's full one; anything else as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def differences(ours, theirs, tolerance=None, place=""):
    """(place, ours, theirs) of everything in two results that is not the same.

    Args:
        ours: a value, or dicts and lists of values.
        theirs: what it is compared with.
        tolerance: relative, of numbers. Default: none, see `are_same`.
        place: where in the results these are.
    """
    if isinstance(ours, dict) and isinstance(theirs, dict):
        pairs = {key: (ours.get(key, "nothing"), theirs.get(key, "nothing")) for key in {**ours, **theirs}}
    elif isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        pairs = dict(enumerate(itertools.zip_longest(ours, theirs, fillvalue="nothing")))
    else:
        same = are_same(ours, theirs) if tolerance is None else are_close(ours, theirs, tolerance)
        return [] if same else [(place, ours, theirs)]
    return [found for key, pair in pairs.items() for found in differences(*pair, tolerance, f"{place}/{key}")]


def are_same(ours, theirs):
    """Whether two values are of one type and form, and equal without a tolerance; NaN is equal to itself."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(theirs, torch.Tensor):
        alike = ours.dtype == theirs.dtype and ours.shape == theirs.shape
        return alike and bool(((ours == theirs) | ((ours != ours) & (theirs != theirs))).all())
    if isinstance(theirs, np.ndarray):
        return ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    return bool(ours == theirs) or (isinstance(theirs, float) and math.isnan(ours) and math.isnan(theirs))


def are_close(ours, theirs, tolerance):
    """Whether two values of results in JSON are equal, numbers to a relative tolerance where one has a fraction."""
    numbers = all(isinstance(value, int | float) for value in (ours, theirs))
    if numbers and (isinstance(ours, float) or isinstance(theirs, float)):
        return math.isclose(ours, theirs, rel_tol=tolerance, abs_tol=1e-9)
    return bool(ours == theirs)
