"""Models that a server runs, and a check of them."""

from .servable_module import ServableModule
from .servable_module_validator import ServableModuleValidator

__all__ = ["ServableModule", "ServableModuleValidator"]
