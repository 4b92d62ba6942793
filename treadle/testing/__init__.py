"""Helpers for testing training code: `treadle.testing.faults` injects planned failures."""
