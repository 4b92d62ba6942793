"""Names of ``accelerate.commands.test``; written by `make compat`."""

from ...common.peer_names import export_peer_names

__getattr__, __dir__, __all__ = export_peer_names(__name__)
