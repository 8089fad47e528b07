"""The glossary is whole and explains without circles, and the book's prose keeps to its words."""

import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from minibatcher.errors import InvalidParameter
from minibatcher.labkit.glossary import find_term, glossary, load_symbols, load_terms, notation

ROOT = Path(__file__).resolve().parents[1]
TERMS = load_terms()
PROSE = sorted([*(ROOT / "chapters").glob("*.md"), *(ROOT / "solutions").glob("*.md")])
EVERYDAY = {"GPU"}  # in capitals, yet no term: every reader has heard of it
ENTRY = pytest.mark.parametrize("term", TERMS, ids=lambda term: term.term)


def pattern_of(names):
    """Any of these names as a whole word, the longest first, so that KV cache is not KV."""
    ordered = sorted(names, key=len, reverse=True)
    return re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, ordered))})(?![\w-])", re.IGNORECASE)


def with_plurals(names):
    """{spelling in lower case: the term}"""
    found = {}
    for name, term in names:
        plurals = {f"{name}s", f"{name}es", re.sub("y$", "ies", name)}
        found |= {spelling.casefold(): term for spelling in {name, *plurals}}
    return found


NAMES = with_plurals((name, term.term) for term in TERMS for name in (term.term, *term.also))
MENTION = pattern_of(NAMES)


def mentions(text):
    return {NAMES[match[0].casefold()] for match in MENTION.finditer(text)}


def prose_of(markdown):
    """What the book says in its own voice: no code, no sources, no word that is only named (in quotes or italics)."""
    text = re.sub(r"\A---\n.*?\n---\n", "", markdown, flags=re.DOTALL)
    text = re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^## Sources\n.*?(?=^## |\Z)", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`\n]+`|\]\([^)\s]*\)", " ", text).replace("**", "")
    return " ".join(re.sub(r"«[^»]*»|“[^”]*”|\"[^\"\n]*\"|(?<![\w*])\*[^*\n]+\*(?!\w)", " ", text).split())


def strays(markdown):
    """Each word that the glossary says not to use, with the one to use."""
    instead = with_plurals((name, term.term) for term in TERMS for name in term.avoid)
    return [f"{m[0]!r}: say {instead[m[0].casefold()]!r}" for m in pattern_of(instead).finditer(prose_of(markdown))]


@ENTRY
def test_an_entry_is_whole(term):
    assert all(text and text == " ".join(text.split()) for text in (term.term, term.french, term.explanation))
    assert term.explanation.endswith(".") and term.explanation[0].isupper()
    assert len(term.explanation) <= 160
    assert all(name and name == " ".join(name.split()) for name in (*term.also, *term.avoid))


@ENTRY
def test_an_explanation_uses_no_jargon_from_outside(term):
    words = re.findall(r"\b(?:[A-Z]{2,}|\w+_\w+)\b", MENTION.sub(" ", term.explanation))
    assert set(words) <= EVERYDAY


def test_they_are_sorted_and_each_name_stands_once():
    assert [term.term for term in TERMS] == sorted((term.term for term in TERMS), key=str.casefold)
    names = [[name.casefold() for name in (term.term, *term.also, *term.avoid)] for term in TERMS]
    assert all(len(set(own)) == len(own) for own in names)
    names = [{*own, term.french.casefold()} for own, term in zip(names, TERMS)]  # some are the same in French
    assert len(set().union(*names)) == sum(map(len, names))


def test_chapters_stand_in_the_contents():
    contents = (ROOT / "chapters" / "index.md").read_text(encoding="utf-8")
    known = set(re.findall(r"^\| \[?(7\.\d) ", contents, re.MULTILINE))
    assert known == {term.chapter for term in TERMS}


def test_explanations_have_no_circles():
    uses = {term.term: mentions(term.explanation) for term in TERMS}
    assert uses["prefill"] >= {"prompt", "token", "KV cache"}
    assert "keys and values" not in uses["prefill"]  # the KV of KV cache is no mention of its own
    assert "query" in uses["grouped-query attention"]
    assert not [name for name, others in uses.items() if name in others]
    TopologicalSorter(uses).prepare()  # raises CycleError, which names the circle


def test_a_term_is_not_explained_by_what_comes_in_a_later_chapter():
    chapter = {term.term: term.chapter for term in TERMS}
    late = [(t.term, other) for t in TERMS for other in mentions(t.explanation) if chapter[other] > t.chapter]
    assert not late


def test_knobs_are_those_of_the_package():
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "minibatcher").rglob("*.py"))
    names = {term.term for term in TERMS if "_" in term.term} | {symbol.code for symbol in load_symbols()} - {""}
    assert {"max_num_seqs", "max_num_batched_tokens", "num_kv_heads"} <= names
    assert not [name for name in names if not re.search(rf"\b{name}: ", source)]


def test_every_letter_of_a_shape_is_in_the_notation():
    rooms = [path for room in ("attention", "model", "runners") for path in (ROOT / "minibatcher" / room).glob("*.py")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in rooms)
    used = {part for shape in re.findall(r"\[([\w ,*+]+)\]", source) for part in re.findall(r"\b[A-Z]\b", shape)}
    letters = [symbol.symbol for symbol in load_symbols()]
    assert used == {"B", "M", "N", "R", "T", "W"}
    assert used <= set(letters) and len(set(letters)) == len(letters)


def test_a_term_prints_its_line(capsys):
    glossary("prefill")
    printed = " ".join(capsys.readouterr().out.split())
    term = find_term("prefill")
    assert printed.startswith(f"prefill: {term.explanation} French: préremplissage. Chapter 7.0.")
    assert "Not used for it: prompt processing" in printed


@pytest.mark.parametrize(
    ("name", "term"),
    [
        ("TTFT", "time to first token"),
        ("ttft", "time to first token"),
        ("  kv   Cache ", "KV cache"),
        ("iteration", "step"),
        ("préremplissage", "prefill"),
        ("attention", "attention"),
        ("requête", "request"),
    ],
)
def test_a_term_is_found_by_any_of_its_names(name, term):
    assert find_term(name).term == term


def test_an_unknown_term_gets_the_nearest_ones():
    with pytest.raises(InvalidParameter, match=r"'prefil' is not in the glossary; near it: prefill.*glossary\(\)"):
        glossary("prefil")
    with pytest.raises(InvalidParameter, match=r"'zzz' is not in the glossary; glossary\(\) shows all terms"):
        glossary("zzz")


@pytest.fixture
def shown(monkeypatch):
    pytest.importorskip("IPython")
    outputs = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: outputs.append(data))
    return outputs


def test_the_table_and_its_twin_say_the_same(shown):
    glossary()
    (output,) = shown
    page, text = output["text/html"], " ".join(output["text/plain"].split())
    assert page.count('<th scope="row"') == len(TERMS) and page.count(' lang="fr"') == len(TERMS)
    for term in TERMS:
        for words in (term.term, term.explanation, term.french, *term.also, *term.avoid):
            assert words.replace("'", "&#x27;") in page
            assert words in text
    notation()
    page, text = shown[1]["text/html"], shown[1]["text/plain"]
    assert all(symbol.meaning in page and symbol.meaning in text for symbol in load_symbols())


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.name)
def test_the_prose_keeps_to_the_words(path):
    assert strays(path.read_text(encoding="utf-8")) == []


def test_a_stray_word_is_found_and_a_named_one_is_not():
    assert strays("Each iteration takes two\nticks.") == ["'iteration': say 'step'", "'ticks': say 'step'"]
    assert strays("A **KV\npage** is full.") == ["'KV page': say 'KV block'"]
    assert strays("An *important* iteration of a *good* kind") == ["'iteration': say 'step'"]
    assert strays("Orca says *iteration*, others «tick» or `lane`; iteration-level scheduling is its name.") == []
    assert strays("## Sources\n\n- at one iteration\n\n## After\n\na lane") == ["'lane': say 'slot'"]
    assert strays("Text.\n\n```{code-cell}\nfor iteration in range(3):\n    pass\n```\n\nthe priority lanes") == [
        "'priority lanes': say 'priority class'"
    ]
