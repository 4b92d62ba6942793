"""Configurations: YAML files and overrides that are merged, checked, and built into objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ...common.messages import make_printable
    from .resolve import (
        COMMAND_LINE,
        SECTIONS,
        Config,
        load,
        merge_sources,
        parse_path,
        resolve,
        resolve_references,
    )
    from .values import (
        DEFAULT,
        ConfigError,
        Value,
        format_path,
        hide_secrets,
        iterate_values,
        make_value,
        normalize,
        split_at_secrets,
        to_plain,
    )
    from .yaml_loader import parse, parse_scalar, read, read_text

__getattr__, __dir__, __all__ = lazy_exports(__name__)
