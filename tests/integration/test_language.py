"""Docstrings, messages and documents use the field's words, and public docstrings have their sections."""

import ast
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from support import house
from support.house import ROOT

TREADLE = "treadle"  # the folder of `treadle/__init__.py` and of the modules beside it
FOLDERS = (*house.TOP_ROOMS, TREADLE)
check_reference = house.load_script(".ci/check_reference.py")


@dataclass(frozen=True)
class Phrase:
    """A phrase that reads badly, as a regular expression, with the better words.

    Attributes:
        pattern: What to look for.
        better: What to write instead.
        caught: A sentence that the pattern finds.
        passes: A sentence that it must not find.
    """

    pattern: str
    better: str
    caught: str
    passes: str

    def find(self, text: str) -> str | None:
        """Return the first match in a text, or None."""
        match = re.search(self.pattern, text)
        return None if match is None else match[0]


PHRASES = (
    Phrase(r"\b(?:go|goes|gone) on\b", "resume, continue", "The run goes on.", "That depends on the run."),
    Phrase(
        r"(?<![Tt]here )\bis no (?!longer\b|more\b|less\b|such\b)",
        "is not a",
        "The last stage is no fit.",
        "There is no fit, and it is no longer needed.",
    ),
    Phrase(
        r"(?<![Tt]here )\b(?:is|are) none\b", "is not one, has none", "X is none of them.", "If there is none, None."
    ),
    Phrase(r"\b[Ww]hoever\b", "name who does it", "Whoever wants it waits.", "Wherever it is, it waits."),
    Phrase(r"\bof (?:one's|your) own\b", "user-defined, custom", "A loop of your own.", "It has its own loop."),
    Phrase(
        r"\bwhat (?:it|they|this|that) costs?\b", "overhead, peak memory", "Measure what it costs.", "What it does."
    ),
    Phrase(r"\bmore than no\b", "positive", "It must be more than no time.", "It takes more than one step."),
    Phrase(r"\b(?:is|are|was|were) gone\b", "removed, deleted, dead", "The file is gone.", "The file is removed."),
    Phrase(r"\bst(?:and|ands|ood) in for\b", "fall back to, replace", "They stand in for it.", "They stand in line."),
    Phrase(r"\btak(?:e|es|ing) the place of\b", "replace", "It takes the place of X.", "It takes place at the end."),
    Phrase(r"\bin the place of\b", "instead of", "A name in the place of a path.", "A name in place."),
    Phrase(
        r"\b(?:is|are|be) said\b(?! to\b)", "is reported, is set", "What is wrong is said.", "It is said to be slow."
    ),
    Phrase(r"\bweighed\b", "weighted", "The loss is weighed.", "The loss is weighted."),
    Phrase(r"\blets? go of\b", "release", "It lets go of the memory.", "It lets the program go."),
    Phrase(r"\bbegins? anew\b", "start again", "The epoch begins anew.", "The epoch begins."),
    Phrase(r"\bwithout a word\b", "silently", "It was dropped without a word.", "It was dropped without warning."),
    Phrase(r"\bone of the others\b", "another rank", "It waits for one of the others.", "It is one of the three."),
    Phrase(r"\bthe first process\b(?! of\b)", "rank zero", "On the first process.", "On the first process of a node."),
    Phrase(r"\b(?:is|are) off(?=[.,;:)]|$)", "is disabled", "The bar is off.", "It is off by one."),
    Phrase(r"\bhow (?:it|they|things) stands?\b", "state", "See how it stands.", "See how it runs."),
    Phrase(
        r"\b(?:stays?|(?:is|are) left) as (?:it|they) (?:is|are|was|were)\b",
        "is unchanged",
        "The file stays as it is.",
        "The file stays where it is.",
    ),
)

FIRST_WORDS = ("What", "Which", "Whether", "How")


@dataclass(frozen=True)
class Text:
    """A text of a file: a docstring, a message or a paragraph.

    Attributes:
        folder: The folder that it belongs to.
        place: File and line.
        words: The text.
    """

    folder: str
    place: str
    words: str


def folder_of(module: str) -> str:
    """Return the top-level folder of a module below ``treadle``."""
    first = module.partition(".")[0]
    return first if first in house.TOP_ROOMS else TREADLE


@cache
def read_docstrings() -> tuple[Text, ...]:
    """Return all docstrings of the package."""
    texts = []
    for module, path in house.files().items():
        for node in ast.walk(house.tree(module)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                words = ast.get_docstring(node)
                if words is not None:
                    line = getattr(node, "lineno", 1)
                    texts.append(Text(folder_of(module), f"{shorten(path)}:{line}", words))
    return tuple(texts)


@cache
def read_messages() -> tuple[Text, ...]:
    """Return the text of every ``raise``, ``warn`` and ``announce``; a placeholder of an f-string is ``{}``."""
    texts = []
    for module, path in house.files().items():
        for node in ast.walk(house.tree(module)):
            call = node.exc if isinstance(node, ast.Raise) else node
            is_message = isinstance(node, ast.Raise) or _name_call(node) in ("warn", "announce")
            if is_message and isinstance(call, ast.Call):
                words = " ".join(filter(None, map(join_pieces, [*call.args, *(word.value for word in call.keywords)])))
                texts.append(Text(folder_of(module), f"{shorten(path)}:{node.lineno}", words))
    return tuple(texts)


def _name_call(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def join_pieces(node: ast.expr) -> str:
    """Return the text of a string expression: literals, f-strings, sums and choices of them."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(join_pieces(value) if isinstance(value, ast.Constant) else "{}" for value in node.values)
    if isinstance(node, ast.BinOp):
        return join_pieces(node.left) + join_pieces(node.right)
    if isinstance(node, ast.IfExp):
        return f"{join_pieces(node.body)} {join_pieces(node.orelse)}"
    return ""


@cache
def read_prose() -> tuple[Text, ...]:
    """Return the lines of README.md and of the documents, without code blocks, code spans and comments."""
    texts = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        folder = "README.md" if path.parent == ROOT else "docs"
        lines = strip_code(path.read_text(encoding="utf-8")).splitlines()
        texts += [Text(folder, f"{shorten(path)}:{number}", line) for number, line in enumerate(lines, 1) if line]
    return tuple(texts)


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


@dataclass(frozen=True)
class Documented:
    """A public function, method or class, and what its docstring lacks.

    Attributes:
        folder: The folder of its module.
        name: The public name.
        lacks: By section (``Args``, ``Returns``, ``Example``), whether the docstring lacks it. A section that is not
            needed is not listed.
    """

    folder: str
    name: str
    lacks: dict[str, bool]


@cache
def list_documented() -> tuple[Documented, ...]:
    """Return the public classes, functions and methods of the package, each once."""
    found, seen = [], set()
    for name, value in check_reference.list_public_names().items():
        if id(value) in seen or not (getattr(value, "__module__", None) or "").startswith("treadle"):
            continue
        seen.add(id(value))
        folder = folder_of(value.__module__.partition(".")[2])
        if inspect.isclass(value):
            found.append(Documented(folder, name, {"Example": ">>>" not in (value.__doc__ or "")}))
            found += [Documented(folder, f"{name}.{key}", check(method)) for key, method in list_methods(value)]
        elif inspect.isroutine(value):
            found.append(Documented(folder, name, check(value)))
    return tuple(found)


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


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_verb_or_a_noun(folder):
    texts = [text for text in read_docstrings() if text.folder == folder]
    assert texts
    wrong = [f"{t.place}: {t.words[:60]!r}" for t in texts if t.words.split(" ")[0] in FIRST_WORDS]
    assert wrong == [], f"{len(wrong)} of {len(texts)}: begin with a verb ('Return ...'), a class with a noun"


@pytest.mark.parametrize("folder", [*FOLDERS, "docs", "README.md"])
def test_phrases_have_better_words(folder):
    texts = (*read_docstrings(), *read_messages(), *read_prose())
    wrong = [
        f"{text.place}: {found!r}; better: {phrase.better}"
        for text in texts
        if text.folder == folder
        for phrase in PHRASES
        if (found := phrase.find(" ".join(text.words.split()))) is not None
    ]
    assert wrong == [], f"{len(wrong)} phrases"


@pytest.mark.parametrize("phrase", PHRASES, ids=lambda phrase: phrase.better)
def test_a_phrase_is_found_where_it_is_and_nowhere_else(phrase):
    assert phrase.find(phrase.caught) is not None
    assert phrase.find(phrase.passes) is None


def test_the_sentences_that_pass_hold_no_phrase_at_all():
    held = {phrase.passes: [other.find(phrase.passes) for other in PHRASES] for phrase in PHRASES}
    assert {passes: found for passes, found in held.items() if any(found)} == {}


def test_public_docstrings_have_their_sections():
    needed, lacking = Counter(), {}
    for entry in list_documented():
        for section, lacks in entry.lacks.items():
            needed[section] += 1
            lacking.setdefault(section, []).extend([entry.name] * lacks)
    print(*(f"{section}: {needed[section] - len(lacking[section])} of {needed[section]}" for section in LEAST))
    short = [s for s, least in LEAST.items() if needed[s] - len(lacking[s]) < least * needed[s]]
    assert {section: lacking[section] for section in short} == {}


def test_code_and_comments_are_no_prose():
    text = "it goes `on` on\n```text\nit goes on\n```\n<!-- it goes\non -->\nend ``a ` b``"
    assert strip_code(text).splitlines() == ["it goes `` on", *[""] * 5, "end ``"]


def test_pieces_of_messages_are_joined():
    def join(source):
        return join_pieces(ast.parse(source, mode="eval").body)

    assert join("f'{a} is ' 'no ' f'{b}' + ('x' if c else 'y')") == "{} is no {}x y"
    assert join("f(3)") == ""
