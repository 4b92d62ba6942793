"""Construction of objects from a configuration, after all names are resolved and all arguments are checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from . import catalog
    from .annotation_words import PLAIN, describe_annotation, format_value, simplify
    from .annotations import Checker
    from .build import CheckedConfig, check, locate_error
    from .recipes import CollectionRecipe, MappingRecipe, ObjectRecipe, Opaque, PlainRecipe, Recipe, make_default_value

__getattr__, __dir__, __all__ = lazy_exports(__name__)
