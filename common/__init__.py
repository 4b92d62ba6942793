"""Helpers for all packages: messages, durations, argument checks, optional packages, lazy exports."""

__version__ = "0.1.0"
