"""Launchers that start the processes of a run from a script, notebook or the command line, on one or many machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ..processes import is_alive
    from . import supervisor
    from .notebook import FunctionLaunch, debug_launcher, notebook_launcher
    from .rendezvous import Job
    from .supervisor import cpus

__getattr__, __dir__, __all__ = lazy_exports(__name__)
