"""MosaicML's streaming without its face, which imports torchvision: the real package below `streaming.base`."""

import importlib.util
import sys
import types

import pytest


def import_streaming():
    """Returns ``streaming.base``; skips the test where the package is missing.

    The Makefile installs it without the dependencies that it names: they would replace NumPy and transformers, and
    bring torchvision (0.13).
    """
    spec = importlib.util.find_spec("streaming")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("mosaicml-streaming is not installed")
    if "streaming" not in sys.modules:
        face = types.ModuleType("streaming")
        face.__path__ = list(spec.submodule_search_locations)
        face.__spec__ = spec
        sys.modules["streaming"] = face
    import streaming.base

    return streaming.base
