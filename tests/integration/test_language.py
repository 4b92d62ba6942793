"""Docstrings, messages and documents use the field's words, and public docstrings have their sections."""

from collections import Counter

import pytest
from support import language

LEAST = {"Args": 0.95, "Returns": 0.95, "Example": 1.0}


@pytest.mark.parametrize("folder", language.FOLDERS)
def test_docstrings_begin_with_a_verb_or_a_noun(folder):
    texts = [text for text in language.read_docstrings() if text.folder == folder]
    assert texts
    wrong = [f"{t.place}: {t.words[:60]!r}" for t in texts if t.words.split(" ")[0] in language.FIRST_WORDS]
    assert wrong == [], f"{len(wrong)} of {len(texts)}: begin with a verb ('Return ...'), a class with a noun"


@pytest.mark.parametrize("folder", [*language.FOLDERS, "docs", "README.md"])
def test_phrases_have_better_words(folder):
    texts = (*language.read_docstrings(), *language.read_messages(), *language.read_prose())
    wrong = [
        f"{text.place}: {found!r}; better: {phrase.better}"
        for text in texts
        if text.folder == folder
        for phrase in language.PHRASES
        if (found := phrase.find(" ".join(text.words.split()))) is not None
    ]
    assert wrong == [], f"{len(wrong)} phrases"


@pytest.mark.parametrize("phrase", language.PHRASES, ids=lambda phrase: phrase.better)
def test_a_phrase_is_found_where_it_is_and_nowhere_else(phrase):
    assert phrase.find(phrase.caught) is not None
    assert phrase.find(phrase.passes) is None


def test_the_sentences_that_pass_hold_no_phrase_at_all():
    held = {phrase.passes: [other.find(phrase.passes) for other in language.PHRASES] for phrase in language.PHRASES}
    assert {passes: found for passes, found in held.items() if any(found)} == {}


def test_public_docstrings_have_their_sections():
    needed, lacking = Counter(), {}
    for entry in language.list_documented():
        for section, lacks in entry.lacks.items():
            needed[section] += 1
            lacking.setdefault(section, []).extend([entry.name] * lacks)
    print(*(f"{section}: {needed[section] - len(lacking[section])} of {needed[section]}" for section in LEAST))
    short = [s for s, least in LEAST.items() if needed[s] - len(lacking[s]) < least * needed[s]]
    assert {section: lacking[section] for section in short} == {}


def test_code_and_comments_are_no_prose():
    text = "it goes `on` on\n```text\nit goes on\n```\n<!-- it goes\non -->\nend ``a ` b``"
    assert language.strip_code(text).splitlines() == ["it goes `` on", *[""] * 5, "end ``"]


def test_pieces_of_messages_are_joined():
    def join(source):
        return language.join_pieces(language.ast.parse(source, mode="eval").body)

    assert join("f'{a} is ' 'no ' f'{b}' + ('x' if c else 'y')") == "{} is no {}x y"
    assert join("f(3)") == ""
