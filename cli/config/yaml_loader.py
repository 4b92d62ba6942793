"""Loader of YAML files that creates plain data only."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml

from ...common.messages import closest_name
from .values import ConfigError, Value

MOST_BYTES = 2**18
MOST_VALUES = 100_000  # after expansion: an alias counts as all values that it represents

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = {".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}
_CORE = "tag:yaml.org,2002:"
_MERGE = "tag:yaml.org,2002:merge"
_PLAIN = "plain"
_KINDS: dict[str, Any] = {"null": type(None), "bool": bool, "int": int, "float": int | float}


class _Loader(yaml.SafeLoader):
    """YAML loader that leaves plain scalars as text; `parse_scalar` converts them."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode and implicit[0]:
            return _MERGE if value == "<<" else _PLAIN
        return str(super().resolve(kind, value, implicit))


def parse_scalar(text: str) -> Any:
    """Convert a plain scalar by the rules of YAML 1.2: ``3e-4`` is a number; ``no``, ``12:30`` and dates are text.

    Unlike in YAML 1.2, underscores may separate digits, as in ``1_000``.

    Raises:
        ValueError: If an integer has too many digits for Python.
    """
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text.replace("_", ""))
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return _SPECIAL.get(text.lower(), text)


def read(file: str | Path) -> Value:
    """Return the values in a YAML file."""
    value = parse(read_text(file), str(file))
    if value is None or value.data is None:
        raise ConfigError(f"{file}: the file is empty, but needs sections with keys, such as `trainer:`.")
    return value


def read_text(file: str | Path) -> str:
    """Return the text of a configuration file, which may have at most 256 KiB."""
    path = Path(file)
    try:
        if not path.is_file():
            raise ConfigError(f"{file or repr(file)}: {_describe_missing(path)}")
        with path.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(f"{file}: the file has more than {MOST_BYTES:,} bytes, the limit for a configuration.")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file}: the file is not UTF-8 text: the byte at offset {error.start:,} is invalid. Save it as UTF-8."
        ) from error
    except OSError as error:
        raise ConfigError(f"{file!s:.200}: can't be read: {error.strerror}.") from error


def parse(text: str, name: str, lines: bool = True) -> Value | None:
    """Return the values parsed from a YAML text, or None if the text has no content.

    ``lines`` adds line numbers to the sources, and requires that the text is a mapping.
    """
    try:
        node = yaml.compose(text, _Loader)  # the syntax tree: tags are not executed
        value = None if node is None else _NodeReader(name, lines).read_value(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{_format_place(name, mark, lines)}: {_explain_error(error, text)}") from error
    except yaml.reader.ReaderError as error:
        place = f"{name}:{text.count(chr(10), 0, error.position) + 1}" if lines else name
        raise ConfigError(
            f"{place}: the character #x{error.character:04x} is not allowed in YAML. Remove it."
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: {' '.join(str(error).split())}.") from error
    except RecursionError as error:
        raise ConfigError(
            f"{name}: the YAML is nested too deeply, or an alias refers to an anchor that contains the alias. Flatten "
            "the YAML, or remove the alias."
        ) from error
    if lines and value is not None and not isinstance(value.data, dict | None):
        kind = "list" if isinstance(value.data, list) else "single value"
        raise ConfigError(f"{name}:1: the file contains a {kind}, but needs sections with keys, such as `trainer:`.")
    return value


class _NodeReader:
    """Reader that converts the nodes of one YAML text to values, up to a maximum number."""

    def __init__(self, name: str, lines: bool) -> None:
        self.name, self.lines, self.count = name, lines, 0

    def read_value(self, node: yaml.Node, line: yaml.Mark | None = None) -> Value:
        source = _format_place(self.name, line or node.start_mark, self.lines)
        self.count += 1
        if self.count > MOST_VALUES:
            raise ConfigError(
                f"{source}: with its aliases expanded, the YAML has more than {MOST_VALUES:,} values, the limit for a "
                "configuration."
            )
        if isinstance(node, yaml.MappingNode):
            self._check_tag(node, ("map",), source)
            return Value(self._read_pairs(node), source)
        if isinstance(node, yaml.SequenceNode):
            self._check_tag(node, ("seq",), source)
            return Value([self.read_value(item) for item in node.value], source)
        return self._read_scalar(node, source)

    def _read_pairs(self, node: yaml.MappingNode) -> dict[Any, Value]:
        pairs: dict[Any, Value] = {}
        merged_pairs: dict[Any, Value] = {}
        for key_node, item in node.value:
            place = _format_place(self.name, key_node.start_mark, self.lines)
            if key_node.tag == _MERGE:
                merged_pairs = self._read_merged(item, place) | merged_pairs
                continue
            key = self.read_value(key_node).data
            if isinstance(key, bool) or not isinstance(key, str | int):
                shown = "a list or a mapping."
                if isinstance(key_node, yaml.ScalarNode):
                    shown = f"{key_node.value}. Quote it." if key_node.value else "empty."
                raise ConfigError(f"{place}: a key must be a word or an integer, not {shown}")
            absent = isinstance(item, yaml.ScalarNode) and item.tag == _PLAIN and not item.value
            if node.flow_style and absent and ":" in str(key):
                raise ConfigError(f"{place}: {key!r} is a key without a value. Put a space after the ':'.")
            if key in pairs:
                raise ConfigError(
                    f"{place}: the key {key!r} appears twice, first in {pairs[key].source}. Keep one of them."
                )
            pairs[key] = self.read_value(item, key_node.start_mark)
        return merged_pairs | pairs

    def _read_merged(self, node: yaml.Node, place: str) -> dict[Any, Value]:
        mapping_nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        pairs: dict[Any, Value] = {}
        for mapping_node in mapping_nodes:
            if not isinstance(mapping_node, yaml.MappingNode):
                raise ConfigError(
                    f"{place}: '<<' needs an alias for a mapping, as in '<<: *name', or a list of aliases."
                )
            pairs = self._read_pairs(mapping_node) | pairs
        return pairs

    def _read_scalar(self, node: yaml.ScalarNode, source: str) -> Value:
        text, kind = node.value, node.tag.removeprefix(_CORE)
        if kind == "str":  # quoted, a block, or tagged as text
            return Value(text, source)
        try:
            data = parse_scalar(text)
        except ValueError as error:
            raise ConfigError(f"{source}: {text[:40]!r} can't be read as a number: {error}.") from error
        if kind != _PLAIN:
            self._check_tag(node, tuple(_KINDS), source)
            if not isinstance(data, _KINDS[kind]):
                raise ConfigError(f"{source}: {text[:40]!r} does not match its tag '!!{kind}'. Remove the tag.")
        return Value(data, source, text if not isinstance(data, str) else None)

    def _check_tag(self, node: yaml.Node, allowed: tuple[str, ...], source: str) -> None:
        if node.tag not in [_CORE + name for name in allowed]:
            short = node.tag.replace(_CORE, "!!")
            raise ConfigError(
                f"{source}: the tag {short!r} is not allowed, because a configuration is plain data. Remove it."
            )


def _format_place(name: str, mark: yaml.Mark | None, lines: bool) -> str:
    return name if mark is None or not lines else f"{name}:{mark.line + 1}"


def _explain_error(error: yaml.MarkedYAMLError, text: str) -> str:
    problem, mark = str(error.problem), error.problem_mark
    if mark is not None and "but got '{'" in problem and text[mark.index - 1 : mark.index] == "$":
        return 'within [ ] and { } a reference must be quoted: "${section.key}".'
    if "'\\t'" in problem:
        return "a tab is not allowed here; indent YAML with spaces."
    if "but found '<scalar>'" in problem:
        return "text follows the end of a value: quote the whole value, or fix the indentation."
    if "scanning an alias" in str(error.context):
        return "text that begins with '*' must be quoted."
    if "cannot start any token" in problem:
        return f"{problem}: quote the text."
    if "expected <block end>" in problem:
        return "the indentation does not match the lines above."
    if "single document" in str(error.context):
        return "a second document begins here ('---'), but a file contains one configuration. Remove the second one."
    if "undefined alias" in problem:
        return f"{problem}: an anchor '&name' must come before its alias '*name'."
    if "mapping values are not allowed" in problem:
        return "one ':' too many, or wrong indentation: quote text that contains ': '."
    context = f"{error.context}: " if error.context else ""
    return f"{context}{problem}."


def _describe_missing(path: Path) -> str:
    if path.is_dir():
        return "this is a folder. Pass a file in it."
    try:
        names = sorted(sibling.name for sibling in path.parent.iterdir() if sibling.suffix in (".yaml", ".yml"))
    except OSError:
        return f"the file does not exist, nor does the folder {str(path.parent)!r}."
    close = closest_name(path.name, names)
    missing = "this is not a regular file." if path.exists() else "the file does not exist."
    return missing if close is None else f"{missing} Did you mean {str(path.parent / close)!r}?"
