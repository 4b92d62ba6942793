"""Helpers of the tests, imported by name: ``from support.processes import run``.

`models` and `trainers` are what most tests need; `samples/` holds modules that command lines and configurations name,
as a user has them beside a script.
"""
