"""Interface of models that a server runs, and a callback that checks such models."""

from .servable_module import ServableModule
from .servable_module_validator import ServableModuleValidator

__all__ = ["ServableModule", "ServableModuleValidator"]
