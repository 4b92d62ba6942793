"""Helpers for all packages: messages, durations, argument checks, optional packages, lazy exports.

This is the bottom layer. It imports neither torch nor any other package of Treadle.
"""
