"""Output of a configuration as YAML."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..config import Value, parse_scalar, split_at_secrets
from ..config.instantiate import Opaque

_BARE = re.compile(r"[A-Za-z_./~][\w./+*()@ -]*")
_YAML_1_1_BOOLS = ("yes", "no", "on", "off", "y", "n")  # YAML 1.1 reads these as true and false
# Characters that are allowed in JSON but not in YAML.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
_REFERENCE_START = re.compile(r"(\\*)\$\{")  # OmegaConf halves the preceding backslashes
_WIDEST = 56  # widest line behind which comments are aligned
Line = tuple[str, str]


def dump_yaml(root: Value, secrets: Mapping[str, str] | None = None, head: str = "") -> str:
    """Return YAML that loads as the configuration ``root``, with the sources of its values in comments.

    A default that is not plain data (`Opaque`) is written as a comment.
    """
    lines = list(_format_mapping(root, "", secrets or {}))
    width = min(_WIDEST, max((len(text) for text, source in lines if source), default=0))
    # For a value from an earlier run's configuration, only its original source is shown.
    shown = [f"{text:<{width}}  # {source.partition(', ')[0]}" if source else text for text, source in lines]
    return "\n".join([*(f"# {line}" for line in head.splitlines()), *shown]) + "\n"


def _format_mapping(value: Value, indent: str, secrets: Mapping[str, str]) -> Iterator[Line]:
    for key, item in value.data.items():
        name = _quote(key) if isinstance(key, str) else str(key)
        if isinstance(item.data, Opaque):
            yield f"{indent}# {name}: {item.data.words}", item.source
        else:
            yield from _format_entry(f"{indent}{name}:", item, indent + "  ", secrets)


def _format_entry(begin: str, value: Value, indent: str, secrets: Mapping[str, str]) -> Iterator[Line]:
    """Yield the lines of a value, which follows ``begin``: an indented ``key:`` or ``-``."""
    data = value.data
    if isinstance(data, dict):
        if all(isinstance(item.data, Opaque) for item in data.values()):
            yield f"{begin} {{}}", value.source
        else:
            yield begin, ""
        yield from _format_mapping(value, indent, secrets)
    elif isinstance(data, list) and any(isinstance(item.data, dict | list) for item in data):
        yield begin, ""
        for item in data:
            yield from _format_item(item, indent, secrets)
    elif isinstance(data, list):
        yield f"{begin} [{', '.join(_format_value(item, secrets, within=True) for item in data)}]", value.source
    else:
        yield f"{begin} {_format_value(value, secrets)}", value.source


def _format_item(value: Value, indent: str, secrets: Mapping[str, str]) -> Iterator[Line]:
    """Yield the lines of a list item. A mapping starts on the line of the dash."""
    if not isinstance(value.data, dict) or not value.data:
        yield from _format_entry(f"{indent}-", value, indent + "  ", secrets)
        return
    lines = list(_format_mapping(value, indent + "  ", secrets))
    first = next((n for n, (text, _) in enumerate(lines) if not text.lstrip().startswith("#")), None)
    if first is None:
        yield f"{indent}- {{}}", value.source
        yield from lines
        return
    text, source = lines.pop(first)
    yield f"{indent}- {text.lstrip()}", source
    yield from lines


def _format_value(value: Value, secrets: Mapping[str, str], within: bool = False) -> str:
    # It has been converted to a number.
    if not isinstance(value.data, str) and value.text is not None and value.text in secrets:
        return json.dumps(secrets[value.text])
    return format_word(value.data, secrets, within)


def format_word(data: Any, secrets: Mapping[str, str] | None = None, within: bool = False) -> str:
    """Return a scalar as YAML. ``within`` quotes any text, as is needed in a list in brackets."""
    if data is None:
        return "null"
    if isinstance(data, bool):
        return "true" if data else "false"
    if isinstance(data, float) and not math.isfinite(data):
        return ".nan" if math.isnan(data) else ".inf" if data > 0 else "-.inf"
    if not isinstance(data, str):
        return repr(data)
    return _quote("".join(_escape(*part) + part[1] for part in split_at_secrets(data, secrets or {})), within)


def _escape(text: str, reference: str) -> str:
    """Escape ``${`` in literal text, and trailing backslashes if a reference follows the text."""
    text = _REFERENCE_START.sub(r"\1\1\\${", text)
    return text + text[len(text.rstrip("\\")) :] if reference else text


def _quote(text: str, within: bool = False) -> str:
    bare = _BARE.fullmatch(text) and not within and text == text.strip() and isinstance(parse_scalar(text), str)
    if bare and text.lower() not in _YAML_1_1_BOOLS:
        return text
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(text, ensure_ascii=False))
