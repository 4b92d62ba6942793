"""Rewriting of one import statement with libcst, which keeps its parentheses, comments and line breaks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeGuard

import libcst as cst

_PRAGMA = re.compile(r"#\s*(noqa|type:|pylint:|isort:|ruff:|pyright:|fmt:|mypy:)")


def rewrite_import(source: str, modules: Mapping[int, str]) -> str:
    """Rewrite a statement ``import a.b as c, d`` and remove duplicates. ``modules`` maps positions to new modules."""
    statement = _parse(source)
    assert isinstance(statement, cst.Import)
    aliases: dict[str, cst.ImportAlias] = {}
    for position, alias in enumerate(statement.names):
        if position in modules:
            alias = alias.with_changes(name=_dotted(modules[position]))
        aliases.setdefault(_text(alias.with_changes(comma=cst.MaybeSentinel.DEFAULT)), alias)
    *others, last = aliases.values()
    return _text(statement.with_changes(names=[*others, last.with_changes(comma=cst.MaybeSentinel.DEFAULT)]))


def rewrite_from(
    source: str, modules: Sequence[str | None], statements: Mapping[int, str], separator: str, trailing: str
) -> str:
    """Rewrite a statement ``from a import b, c`` as one statement for each new module.

    ``modules`` holds the new module of each name. Names whose entry is None stay in the last statement. ``statements``
    maps the positions of names to complete statements that import them. ``separator`` is the text between two
    statements, and ``trailing`` is the comment after the statement. A comment for tools, such as ``# noqa``, is
    repeated after each new statement.
    """
    statement = _parse(source)
    assert isinstance(statement, cst.ImportFrom)
    keys = [statements.get(position, module) for position, module in enumerate(modules)]
    groups = sorted(dict.fromkeys(keys), key=lambda key: key is None)
    texts: list[str] = []
    for key in groups:
        if key in statements.values():
            texts.append(str(key))
            continue
        part = statement if len(groups) == 1 else _keep_names(statement, keys, key, is_first=not texts)
        texts.append(_text(part if key is None else part.with_changes(module=_dotted(key))))
    if "\n" in separator and _PRAGMA.match(trailing):
        texts[:-1] = [f"{text}  {trailing}" for text in texts[:-1]]
    return separator.join(texts)


def _keep_names(
    statement: cst.ImportFrom, keys: Sequence[str | None], wanted: str | None, is_first: bool
) -> cst.ImportFrom:
    """Return the statement with only the names whose key is ``wanted``, and the comments above and next to them."""
    assert not isinstance(statement.names, cst.ImportStar)
    names, positions = list(statement.names), [position for position, key in enumerate(keys) if key == wanted]
    spaces = [statement.lpar.whitespace_after if statement.lpar else None, *map(_space_behind, names)]
    kept = []
    for position, following in zip(positions, [*positions[1:], None], strict=True):
        alias = names[position]
        if following is not None:
            space = _join(spaces[position + 1], spaces[following])
            kept.append(alias if space is None else alias.with_changes(comma=_comma(alias, space)))
        elif position == len(names) - 1:
            kept.append(alias)
        else:
            last, statement = _end_list(alias, statement)
            kept.append(last)
    if statement.lpar is not None:
        space = _join(spaces[0], spaces[positions[0]], has_comment=is_first)
        if space is not None:
            statement = statement.with_changes(lpar=statement.lpar.with_changes(whitespace_after=space))
    return statement.with_changes(names=kept)


def _space_behind(alias: cst.ImportAlias) -> cst.BaseParenthesizableWhitespace | None:
    return alias.comma.whitespace_after if isinstance(alias.comma, cst.Comma) else None


def _comma(alias: cst.ImportAlias, space: cst.BaseParenthesizableWhitespace) -> cst.Comma:
    assert isinstance(alias.comma, cst.Comma)
    return alias.comma.with_changes(whitespace_after=space)


def _join(
    beside: cst.BaseParenthesizableWhitespace | None,
    above: cst.BaseParenthesizableWhitespace | None,
    has_comment: bool = True,
) -> cst.BaseParenthesizableWhitespace | None:
    """Return the whitespace between two names, with the comment next to the first and the lines above the second."""
    if not isinstance(beside, cst.ParenthesizedWhitespace):
        return above if isinstance(above, cst.ParenthesizedWhitespace) and not _has_comment(above) else beside
    line = beside.first_line
    if not has_comment:
        line = line.with_changes(comment=None, whitespace=cst.SimpleWhitespace(""))
    lines = above.empty_lines if isinstance(above, cst.ParenthesizedWhitespace) else []
    return beside.with_changes(first_line=line, empty_lines=lines)


def _end_list(last: cst.ImportAlias, statement: cst.ImportFrom) -> tuple[cst.ImportAlias, cst.ImportFrom]:
    """Make a name the last one in the statement. Keep the comment next to it and the place of the parenthesis."""
    assert not isinstance(statement.names, cst.ImportStar)
    space = _space_behind(last)
    comment = space.first_line if isinstance(space, cst.ParenthesizedWhitespace) else None
    closing = _space_behind(statement.names[-1])
    if closing is None:
        if comment is None or comment.comment is None or statement.rpar is None:
            return last.with_changes(comma=cst.MaybeSentinel.DEFAULT), statement
        closing = statement.rpar.whitespace_before
        statement = statement.with_changes(rpar=cst.RightParen())
    if comment is not None:
        indent = closing if isinstance(closing, cst.ParenthesizedWhitespace) else cst.ParenthesizedWhitespace()
        closing = indent.with_changes(first_line=comment, empty_lines=[])
    return last.with_changes(comma=cst.Comma(whitespace_after=closing)), statement


def _has_comment(space: cst.BaseParenthesizableWhitespace | None) -> TypeGuard[cst.ParenthesizedWhitespace]:
    return isinstance(space, cst.ParenthesizedWhitespace) and (
        space.first_line.comment is not None or any(line.comment is not None for line in space.empty_lines)
    )


def _parse(source: str) -> cst.BaseSmallStatement:
    line = cst.parse_statement(source)
    assert isinstance(line, cst.SimpleStatementLine)
    return line.body[0]


def _dotted(name: str) -> cst.Name | cst.Attribute:
    expression = cst.parse_expression(name)
    assert isinstance(expression, cst.Name | cst.Attribute)
    return expression


def _text(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)
