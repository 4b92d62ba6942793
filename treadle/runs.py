"""Run folders: `RunFolder` creates and reads ``runs/<name>/<number>/``."""

from .trainer.runs import RunFolder

__all__ = ["RunFolder"]
