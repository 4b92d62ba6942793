"""Names and their bindings in one Python file, from its syntax tree."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

ScopeNode = (
    ast.Module
    | ast.FunctionDef
    | ast.AsyncFunctionDef
    | ast.Lambda
    | ast.ClassDef
    | ast.ListComp
    | ast.SetComp
    | ast.DictComp
    | ast.GeneratorExp
)
_NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar

# Half of a tree's nodes are of these classes.
_WITHOUT_NAMES = (ast.expr_context, ast.operator, ast.cmpop, ast.boolop, ast.unaryop)


@dataclass(eq=False)
class Binding:
    """Name that an import of a peer binds.

    Attributes:
        module: The peer's module that the name refers to or is imported from.
        name: The name in ``module`` that is imported; None if the import binds a module.
        position: The position of the alias in the statement.
        is_plain: Whether the statement has the form ``import a.b``, which binds ``a``.
        uses: The expressions that use the name, each with the attributes after the name.
    """

    module: str
    name: str | None
    statement: ast.Import | ast.ImportFrom
    position: int
    is_plain: bool = False
    uses: list[tuple[ast.expr, list[str]]] = field(default_factory=list)


@dataclass(eq=False)
class Scope:
    """Scope of a Python program, such as a module or function, with the names bound in it.

    Attributes:
        bindings: Imports of peers by the name they bind.
        others: Names bound by anything other than an import of a peer.
        outer: Names declared global or nonlocal.
    """

    node: ScopeNode
    parent: Scope | None
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)
    outer: set[str] = field(default_factory=set)

    def find(self, name: str) -> list[Binding]:
        """Return the imports that a name may refer to in this scope."""
        scope: Scope | None = self
        while scope is not None:
            is_visible = scope is self or not isinstance(scope.node, ast.ClassDef)
            if is_visible and name not in scope.outer:
                if name in scope.bindings:
                    return scope.bindings[name]
                if name in scope.others:
                    return []
            scope = scope.parent
        return []


def list_nodes(tree: ast.Module) -> list[tuple[ast.AST, Scope]]:
    """Return a tree's nodes, each with its scope. Record in each scope the names bound other than by imports.

    The traversal is not recursive, because a sum of a thousand terms is a tree that is a thousand nodes deep.
    """
    nodes: list[tuple[ast.AST, Scope]] = []
    stack: list[tuple[ast.AST, Scope]] = [(tree, Scope(tree, None))]
    while stack:
        node, scope = stack.pop()
        nodes.append((node, scope))
        _bind(node, scope)
        inner, outside = scope, set()
        if isinstance(node, ScopeNode) and not isinstance(node, ast.Module):
            inner = Scope(node, scope)
            outside = set(map(id, _list_outside(node)))
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            children.remove(node.args)
            children = [*ast.iter_child_nodes(node.args), *children]
        stack += [
            (child, scope if id(child) in outside else inner)
            for child in reversed(children)
            if not isinstance(child, _WITHOUT_NAMES)
        ]
    return nodes


def _list_outside(node: ast.AST) -> list[ast.AST | None]:
    """Return the parts of a scope's node that belong to the enclosing scope, such as decorators and defaults."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        outside: list[ast.AST | None] = [*node.args.defaults, *node.args.kw_defaults]
        if not isinstance(node, ast.Lambda):
            outside += [*node.decorator_list, node.returns]
        return outside
    if isinstance(node, ast.ClassDef):
        return [*node.decorator_list, *node.bases, *node.keywords]
    return []


def _bind(node: ast.AST, scope: Scope) -> None:
    """Record the names that a node binds or declares global or nonlocal. Imports are not recorded."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        scope.others.add(node.id)
    elif isinstance(node, _NAMED) and node.name:
        scope.others.add(node.name)
    elif isinstance(node, ast.arg):
        scope.others.add(node.arg)
    elif isinstance(node, ast.Global | ast.Nonlocal):
        scope.outer.update(node.names)
