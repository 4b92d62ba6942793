"""Run folders: `RunFolder` makes ``runs/<name>/<number>/`` and reads it."""

from .trainer.runs import RunFolder

__all__ = ["RunFolder"]
