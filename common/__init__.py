"""Helpers of all packages: messages, durations, argument checks, optional packages, lazy exports.

The bottom layer: it imports nothing else of Treadle, and never torch.
"""
