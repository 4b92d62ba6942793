"""The version of Treadle."""

__version__ = "0.1.0"
