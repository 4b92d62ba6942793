"""Migration of the text of a Python file: imports, their uses, and names in strings."""

from __future__ import annotations

import ast
import builtins
import re
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from ...common.peer_names import Answer
from .counterparts import (
    PEER_PACKAGES,
    PeerModule,
    describe_missing,
    find_answer,
    find_counterpart,
    find_dotted,
    find_integration,
    find_module,
    find_submodule,
    follow_attributes,
    list_exports,
    list_modules,
    split_peer,
)
from .differences import Finding, Usage, list_differences
from .import_statements import rewrite_from, rewrite_import

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


_MENTION = re.compile(r"\b(?:" + "|".join((*PEER_PACKAGES, "treadle")) + r")\b")
_DOTTED = re.compile(r"(?:" + "|".join(PEER_PACKAGES) + r")(?:\.\w+)*")
_NEWLINE = re.compile(rb"\r\n|\r|\n")
# Functions whose first argument is the name of a module, or of a module's logger.
_TAKE_MODULES = ("import_module", "__import__", "find_spec", "importorskip", "getLogger")


def mentions_peer(text: str) -> bool:
    """Return whether a text contains the name of a package of Lightning, Fabric or Accelerate, or Treadle's name."""
    return _MENTION.search(text) is not None


def migrate_source(text: str, path: str) -> tuple[str, list[Finding]]:
    """Return a Python file's text after the migration, and the findings.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: If the file cannot be parsed.
    """
    return _Source(text, path).migrate()


class _Source:
    """Source of one Python file, with its edits and findings."""

    def __init__(self, text: str, path: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the compiler about the user's strings
            self.tree = ast.parse(text)
        self.path = path
        self.raw = text.encode()
        self.line_starts = [0, *(match.end() for match in _NEWLINE.finditer(self.raw))]
        self.edits: dict[tuple[int, int], str] = {}
        self.findings: set[Finding] = set()
        self.nodes = list_nodes(self.tree)
        self.bindings: list[Binding] = []
        self.usages: list[Usage] = []

    def migrate(self) -> tuple[str, list[Finding]]:
        for node, scope in self.nodes:
            if isinstance(node, ast.Import):
                self._bind_import(node, scope)
            elif isinstance(node, ast.ImportFrom):
                self._bind_from(node, scope)
        if self.bindings:
            self._find_uses()
        self._edit_strings()
        for node, _ in self.nodes:
            if isinstance(node, ast.Import):
                self._edit_import(node)
            elif isinstance(node, ast.ImportFrom) and self._is_peer(node):
                self._edit_from(node)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                self._rewrite_from(node, [find_integration(node.module, alias.name) for alias in node.names], {})
        if self.bindings:
            self._note_differences()
        return self._apply(), sorted(self.findings)

    # -- positions and edits -----------------------------------------------------------------------------------------

    def _span(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.line_starts[node.lineno - 1] + node.col_offset
        return start, self.line_starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.stmt | ast.expr) -> str:
        start, end = self._span(node)
        return self.raw[start:end].decode()

    def _replace(self, node: ast.stmt | ast.expr, new: str) -> None:
        start, end = self._span(node)
        if self.raw[start:end].decode() != new:
            self.edits[start, end] = new

    def _apply(self) -> str:
        raw = self.raw
        for (start, end), new in sorted(self.edits.items(), reverse=True):
            raw = raw[:start] + new.encode() + raw[end:]
        return raw.decode()

    def _report(self, line: int, text: str, must_change: bool = True) -> None:
        self.findings.add(Finding(self.path, line, text, must_change))

    # -- imports and their uses --------------------------------------------------------------------------------------

    def _bind_import(self, node: ast.Import, scope: Scope) -> None:
        for position, alias in enumerate(node.names):
            name = alias.asname or alias.name.partition(".")[0]
            if split_peer(alias.name) is None:
                scope.others.add(name)
                continue
            module = alias.name if alias.asname else name
            self._bind(scope, name, Binding(module, None, node, position, is_plain=alias.asname is None))

    def _bind_from(self, node: ast.ImportFrom, scope: Scope) -> None:
        for position, alias in enumerate(node.names):
            if alias.name == "*":
                continue
            if not self._is_peer(node):
                scope.others.add(alias.asname or alias.name)
                continue
            assert node.module is not None
            module = find_submodule(node.module, alias.name)
            binding = Binding(module or node.module, None if module else alias.name, node, position)
            self._bind(scope, alias.asname or alias.name, binding)

    def _bind(self, scope: Scope, name: str, binding: Binding) -> None:
        while name in scope.outer and scope.parent is not None:
            scope = scope.parent
        scope.bindings.setdefault(name, []).append(binding)
        self.bindings.append(binding)

    def _is_peer(self, node: ast.ImportFrom) -> bool:
        return not node.level and node.module is not None and split_peer(node.module) is not None

    def _find_uses(self) -> None:
        inner: set[int] = set()
        for node, scope in self.nodes:
            if id(node) in inner or not isinstance(node, ast.Attribute | ast.Name):
                continue
            attributes: list[str] = []
            base: ast.expr = node
            while isinstance(base, ast.Attribute):
                attributes.insert(0, base.attr)
                base = base.value
                inner.add(id(base))
            if isinstance(base, ast.Name) and isinstance(base.ctx, ast.Load):
                for binding in scope.find(base.id):
                    binding.uses.append((node, attributes))

    # -- imports -----------------------------------------------------------------------------------------------------

    def _edit_import(self, node: ast.Import) -> None:
        bindings = [binding for binding in self.bindings if binding.statement is node]
        modules: dict[int, str] = {}
        for binding in bindings:
            alias = node.names[binding.position]
            module = self._choose_module(alias.name, binding) if alias.asname else find_module(alias.name)
            if module is None:
                self._report(node.lineno, describe_missing(*_split_last(alias.name)))
                continue
            modules[binding.position] = module
            self._edit_uses(binding, "treadle" if binding.is_plain else module)
        if modules and not all(_is_ours(binding.module) for binding in bindings):
            self._replace(node, self._keep_newlines(rewrite_import(self._unify(node), modules)))

    def _edit_from(self, node: ast.ImportFrom) -> None:
        assert node.module is not None
        if node.names[0].name == "*":
            modules: list[str | None] = [self._choose_star(node)]
        else:
            modules = [None] * len(node.names)
        bindings = [binding for binding in self.bindings if binding.statement is node]
        statements: dict[int, str] = {}
        for binding in bindings:
            alias = node.names[binding.position]
            if binding.name is None:
                module = self._choose_module(binding.module, binding)
                if module is not None:
                    self._edit_uses(binding, module)
                    modules[binding.position] = module.rpartition(".")[0]
                    if "." not in module:
                        statements[binding.position] = f"import {module} as {alias.asname or alias.name}"
            else:
                home = find_counterpart(node.module, alias.name)
                if isinstance(home, Answer) or home is None:
                    self._report(alias.lineno, describe_missing(node.module, alias.name))
                else:
                    modules[binding.position] = home
                    self._note_uses(binding, alias)
        if not _is_ours(node.module):
            self._rewrite_from(node, modules, statements)

    def _rewrite_from(self, node: ast.ImportFrom, modules: list[str | None], statements: dict[int, str]) -> None:
        if any(module is not None for module in modules):
            separator, trailing = self._between(node)
            new = rewrite_from(self._unify(node), modules, statements, separator, trailing)
            self._replace(node, self._keep_newlines(new))

    def _unify(self, node: ast.stmt) -> str:
        return self._text(node).replace("\r\n", "\n").replace("\r", "\n")

    def _keep_newlines(self, text: str) -> str:
        return text.replace("\n", self._newline)

    @property
    def _newline(self) -> str:
        match = _NEWLINE.search(self.raw)
        return match[0].decode() if match else "\n"

    def _between(self, node: ast.stmt) -> tuple[str, str]:
        """Return the separator between the statements that replace an import, and the comment after the import."""
        start, end = self._span(node)
        line_start = self.line_starts[bisect_right(self.line_starts, start) - 1]
        match = _NEWLINE.search(self.raw, end)
        rest = self.raw[end : match.start() if match else len(self.raw)].decode().strip()
        before = self.raw[line_start:start].decode()
        if before.strip() or (rest and not rest.startswith("#")):
            return "; ", ""
        return f"\n{before}", rest

    def _choose_star(self, node: ast.ImportFrom) -> str | None:
        assert node.module is not None
        peer = split_peer(node.module)
        assert peer is not None
        bound = {name for _, scope in self.nodes for name in (*scope.others, *scope.bindings)}
        used = {each.id for each, _ in self.nodes if isinstance(each, ast.Name)} - bound - set(vars(builtins))
        best: str | None = None
        missing: set[str] = set()
        for module in list_modules(peer):
            exported = list_exports(module)
            lacking = {name for name in used - exported if self._is_public(peer, node.module, name)}
            if best is None or len(lacking) < len(missing):
                best, missing = module, lacking
        if best is None:
            self._report(node.lineno, f"{node.module} has no counterpart in Treadle.")
        for name in sorted(missing) if best is not None else ():
            if isinstance(find_counterpart(node.module, name), Answer):
                self._report(node.lineno, describe_missing(node.module, name))
            else:
                self._report(node.lineno, f"import {name} by name: {best} does not export it to star imports.")
        return best

    @staticmethod
    def _is_public(peer: PeerModule, module: str, name: str) -> bool:
        """Return whether a name may come from a star import of a peer's module."""
        if find_answer(peer, name) is not None:
            return True
        return find_counterpart(module, name) in list_modules(peer) and find_submodule(module, name) is None

    def _choose_module(self, module: str, binding: Binding) -> str | None:
        """Return the counterpart of a peer's module that provides the most names that the program uses, or None."""
        peer = split_peer(module)
        assert peer is not None
        best, most = None, -1
        for ours in list_modules(peer):
            count = sum(self._resolve(module, ours, attributes)[1] for _, attributes in binding.uses)
            if count > most:
                best, most = ours, count
        if best is None:
            self._report(binding.statement.lineno, describe_missing(*_split_last(module)))
        return best

    # -- uses --------------------------------------------------------------------------------------------------------

    def _resolve(self, module: str, ours: str, attributes: Sequence[str]) -> tuple[list[str], bool]:
        """Return the attributes to write after the Treadle module that replaces a peer's, and whether they exist."""
        kept = list(attributes)
        if module == "lightning" and kept[:1] in (["pytorch"], ["fabric"]):
            module = f"lightning.{kept.pop(0)}"
        if follow_attributes(ours, kept)[1]:
            return kept, True
        found = find_dotted(".".join([module, *kept])) if kept else None
        if found is not None and found.startswith(f"{ours}."):
            return found.removeprefix(f"{ours}.").split("."), True
        return kept, False

    def _edit_uses(self, binding: Binding, ours: str) -> None:
        """Rewrite the uses of a module, for which ``ours`` is imported."""
        for node, attributes in binding.uses:
            new, is_found = self._resolve(binding.module, ours, attributes)
            if not is_found:
                self._report_missing(node, binding.module, attributes)
            old_base = self._text(_list_chain(node)[0])
            base = ours if binding.is_plain and not _is_ours(binding.module) else old_base
            if [base, *new] != [old_base, *attributes]:
                self._replace(node, ".".join([base, *new]))
            self._note_chain(node, ours, new)

    def _report_missing(self, node: ast.expr, module: str, attributes: Sequence[str]) -> None:
        names = list(attributes)
        while len(names) > 1 and find_module(".".join([module, names[0]])) is not None:
            module = f"{module}.{names.pop(0)}"
        self._report(node.lineno, describe_missing(module, names[0]))

    # -- strings -----------------------------------------------------------------------------------------------------

    def _edit_strings(self) -> None:
        skipped = {
            id(part)
            for node, _ in self.nodes
            if isinstance(node, ast.Expr | ast.JoinedStr)
            for part in ([node.value] if isinstance(node, ast.Expr) else node.values)
        }
        modules = {id(node.args[0]): _last_name(node.func) for node, _ in self.nodes if _takes_module(node)}
        for node, _ in self.nodes:
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in skipped:
                continue
            if not _DOTTED.fullmatch(node.value):
                continue
            function = modules.get(id(node))
            if function == "getLogger":
                new: str | None = "treadle"  # Treadle's only logger
            else:
                new = find_module(node.value) if function else find_dotted(node.value)
            text = self._text(node)
            if new is not None and re.fullmatch(rf"[rRuU]?([\"']+){re.escape(node.value)}\1", text):
                self._replace(node, text.replace(node.value, new))

    # -- differences -------------------------------------------------------------------------------------------------

    def _note_uses(self, binding: Binding, alias: ast.alias) -> None:
        assert binding.name is not None
        self.usages.append(Usage(alias.lineno, binding.name))
        for node, attributes in binding.uses:
            if not attributes:
                self.usages.append(Usage(node.lineno, binding.name, node=node))

    def _note_chain(self, node: ast.expr, ours: str, attributes: Sequence[str]) -> None:
        count, is_found = follow_attributes(ours, attributes)
        if count and is_found:
            at = _list_chain(node)[count - len(attributes) - 1]
            self.usages.append(Usage(node.lineno, attributes[count - 1], node=at))

    def _note_differences(self) -> None:
        callees = {id(usage.node): usage.name for usage in self.usages if usage.node is not None}
        for node, scope in self.nodes:
            if isinstance(node, ast.Call):
                name = callees.get(id(node.func))
                values = {word.arg: word.value for word in node.keywords if word.arg is not None}
                if name is not None:
                    self.usages.append(Usage(node.lineno, name, keywords=values))
                if isinstance(node.func, ast.Attribute):
                    if isinstance(node.func.value, ast.Name):
                        self.usages.append(Usage(node.lineno, ast.unparse(node.func), keywords=values))
                    self.usages.append(
                        Usage(node.func.end_lineno or node.lineno, f".{node.func.attr}", keywords=values)
                    )
            elif isinstance(node, ast.FunctionDef) and isinstance(scope.node, ast.ClassDef):
                self.usages.append(Usage(node.lineno, f"def {node.name}"))
        for line, text, must_change in list_differences(self.usages):
            self._report(line, text, must_change)


def _list_chain(node: ast.expr) -> list[ast.expr]:
    """Return the expressions of ``a.b.c``: ``a``, ``a.b`` and ``a.b.c``."""
    chain = [node]
    while isinstance(chain[0], ast.Attribute):
        chain.insert(0, chain[0].value)
    return chain


def _is_ours(module: str) -> bool:
    peer = split_peer(module)
    return peer is not None and peer.is_ours


def _split_last(module: str) -> tuple[str, str]:
    parent, _, name = module.rpartition(".")
    return parent or module, name


def _takes_module(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and bool(node.args) and _last_name(node.func) in _TAKE_MODULES


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
