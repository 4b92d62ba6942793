"""Docstrings, messages and documents use the field's words, and public docstrings have their sections."""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support import house
from support.house import ROOT

check_reference = house.load_script(".ci/check_reference.py")

# What reads badly, as a regular expression; better words; and a sentence that has it.
PHRASES = (
    (r"\b(?:go|goes|gone) on\b", "resume, continue", "The run goes on."),
    (r"(?<![Tt]here )\bis no (?!longer\b|more\b|less\b|such\b)", "is not a", "The last stage is no fit."),
    (r"(?<![Tt]here )\b(?:is|are) none\b", "is not one, has none", "X is none of them."),
    (r"\b[Ww]hoever\b", "name who does it", "Whoever wants it waits."),
    (r"\bof (?:one's|your) own\b", "user-defined, custom", "A loop of your own."),
    (r"\bwhat (?:it|they|this|that) costs?\b", "overhead, peak memory", "Measure what it costs."),
    (r"\bmore than no\b", "positive", "It must be more than no time."),
    (r"\b(?:is|are|was|were) gone\b", "removed, deleted, dead", "The file is gone."),
    (r"\bst(?:and|ands|ood) in for\b", "fall back to, replace", "They stand in for it."),
    (r"\btak(?:e|es|ing) the place of\b", "replace", "It takes the place of X."),
    (r"\bin the place of\b", "instead of", "A name in the place of a path."),
    (r"\b(?:is|are|be) said\b(?! to\b)", "is reported, is set", "What is wrong is said."),
    (r"\bweighed\b", "weighted", "The loss is weighed."),
    (r"\blets? go of\b", "release", "It lets go of the memory."),
    (r"\bbegins? anew\b", "start again", "The epoch begins anew."),
    (r"\bwithout a word\b", "silently", "It was dropped without a word."),
    (r"\bone of the others\b", "another rank", "It waits for one of the others."),
    (r"\bthe first process\b(?! of\b)", "rank zero", "On the first process."),
    (r"\b(?:is|are) off(?=[.,;:)]|$)", "is disabled", "The bar is off."),
    (r"\bhow (?:it|they|things) stands?\b", "state", "See how it stands."),
    (r"\b(?:stays?|(?:is|are) left) as (?:it|they) (?:is|are|was|were)\b", "is unchanged", "The file stays as it is."),
)

FIRST_WORDS = ("What", "Which", "Whether", "How")


@cache
def read_docstrings() -> tuple[tuple[str, str], ...]:
    """Return the place and the text of all docstrings of the package."""
    texts = []
    for module, path in house.files().items():
        for node in ast.walk(house.tree(module)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                texts.append((f"{shorten(path)}:{getattr(node, 'lineno', 1)}", ast.get_docstring(node) or ""))
    return tuple(texts)


def read_messages() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of every ``raise``, ``warn`` and ``announce``."""
    for module, path in house.files().items():
        for node in ast.walk(house.tree(module)):
            call = node.exc if isinstance(node, ast.Raise) else node
            if isinstance(call, ast.Call) and (call is not node or name_call(call) in ("warn", "announce")):
                pieces = map(join_pieces, [*call.args, *(word.value for word in call.keywords)])
                yield f"{shorten(path)}:{node.lineno}", " ".join(filter(None, pieces))


def name_call(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def join_pieces(node: ast.expr) -> str:
    """Return the text of a string expression: literals, f-strings with ``{}`` for what is filled in, sums, choices."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(join_pieces(value) if isinstance(value, ast.Constant) else "{}" for value in node.values)
    if isinstance(node, ast.BinOp):
        return join_pieces(node.left) + join_pieces(node.right)
    if isinstance(node, ast.IfExp):
        return f"{join_pieces(node.body)} {join_pieces(node.orelse)}"
    return ""


def read_prose() -> Iterator[tuple[str, str]]:
    """Yield the lines of README.md and of the documents, without code blocks, code spans and comments."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for number, line in enumerate(strip_code(path.read_text(encoding="utf-8")).splitlines(), 1):
            yield f"{shorten(path)}:{number}", line


def strip_code(markdown: str) -> str:
    """Blank the code blocks, code spans and comments of a text, and keep its line numbers."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    markdown = re.sub(r"^( *)```.*?^\1```$", blank, markdown, flags=re.MULTILINE | re.DOTALL)
    markdown = re.sub(r"<!--.*?-->", blank, markdown, flags=re.DOTALL)
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "``", markdown)


def shorten(path: Path) -> str:
    """Return a path below the root of the repository."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def list_documented() -> Iterator[tuple[str, dict[str, bool]]]:
    """Yield the public classes, functions and methods of the package, each once, with what their docstrings lack."""
    seen = set()
    for name, value in check_reference.list_public_names().items():
        if id(value) in seen or not (getattr(value, "__module__", None) or "").startswith("treadle"):
            continue
        seen.add(id(value))
        if inspect.isclass(value):
            yield name, {"Example": ">>>" not in (value.__doc__ or "")}
            yield from ((f"{name}.{key}", check(method)) for key, method in list_methods(value))
        elif inspect.isroutine(value):
            yield name, check(value)


def list_methods(cls: type) -> Iterator[tuple[str, object]]:
    """Yield the public methods that a class documents itself: an override leaves that to the method of its base."""
    for name, value in vars(cls).items():
        method = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        is_own = not any(name in vars(base) for base in cls.__mro__[1:])
        if inspect.isfunction(method) and not name.startswith("_") and is_own:
            yield name, method


def check(function: object) -> dict[str, bool]:
    """Return what the docstring of a function lacks, by section."""
    signature, words = inspect.signature(function), inspect.getdoc(function) or ""  # type: ignore[arg-type]
    lacks = {}
    if [name for name in signature.parameters if name not in ("self", "cls")]:
        lacks["Args"] = not re.search(r"^Args:$", words, re.MULTILINE)
    returned = str(getattr(signature.return_annotation, "__name__", signature.return_annotation))
    nothing = ("None", "NoReturn", "_empty", "Iterator[None]", "Generator[None, None, None]")
    if signature.return_annotation is not signature.empty and returned not in nothing:
        summary = words.partition("\n\n")[0]
        is_said = re.search(r"^(?:Returns|Yields):$", words, re.MULTILINE) or re.search(
            r"\b(?:[Rr]eturns?|[Yy]ields?|[Ii]terate)\b", summary
        )
        lacks["Returns"] = not is_said
    return lacks


LEAST = {"Args": 0.95, "Returns": 0.95, "Example": 1.0}


def test_docstrings_begin_with_a_verb_or_a_noun():
    assert len(read_docstrings()) > 1000
    wrong = [f"{place}: {words[:60]!r}" for place, words in read_docstrings() if words.split(" ")[0] in FIRST_WORDS]
    assert wrong == [], "begin with a verb ('Return ...'), a class with a noun"


@pytest.mark.parametrize("read", [read_docstrings, read_messages, read_prose])
def test_phrases_have_better_words(read):
    wrong = [
        f"{place}: {found[0]!r}; better: {better}"
        for place, words in read()
        for pattern, better, _ in PHRASES
        if (found := re.search(pattern, " ".join(words.split()))) is not None
    ]
    assert wrong == [], f"{len(wrong)} phrases"


def test_each_phrase_is_found_where_it_is():
    assert [better for pattern, better, caught in PHRASES if not re.search(pattern, caught)] == []


def test_public_docstrings_have_their_sections():
    documented = list(list_documented())
    for section, least in LEAST.items():
        needed = [(name, lacks[section]) for name, lacks in documented if section in lacks]
        lacking = [name for name, lacks in needed if lacks]
        assert len(needed) > 100
        assert len(needed) - len(lacking) >= least * len(needed), (section, lacking)


def test_code_and_comments_are_no_prose():
    text = "it goes `on` on\n```text\nit goes on\n```\n<!-- it goes\non -->\nend ``a ` b``"
    assert strip_code(text).splitlines() == ["it goes `` on", *[""] * 5, "end ``"]


def test_pieces_of_messages_are_joined():
    def join(source):
        return join_pieces(ast.parse(source, mode="eval").body)

    assert join("f'{a} is ' 'no ' f'{b}' + ('x' if c else 'y')") == "{} is no {}x y"
    assert join("f(3)") == ""
