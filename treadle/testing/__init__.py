"""Helpers for tests of a training: `treadle.testing.faults` injects planned failures."""
