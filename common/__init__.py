"""Helpers for all packages: messages, durations, argument checks, optional packages, lazy exports."""
