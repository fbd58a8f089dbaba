"""Prose that reads well: no sentence over 40 words, and no docstring that only points elsewhere.

Prose is what a reader reads: paragraphs, list items and cells of tables, without blocks of code. A code span, an address and a
number count as one word each, and the target of a link as none. It is read in the pages for readers, in the changelog's newest
section, and in the docstrings of modules and of public names.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_WORDS = 40
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "tests" / "README.md"])
_LISTED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
PACKAGES = sorted({name.split(".")[0] for name in _LISTED})

_FENCE = re.compile(r"^[ >]*(```|~~~).*?^[ >]*\1[ ]*$", re.MULTILINE | re.DOTALL)
_HTML = re.compile(r"<!--.*?-->|</?[a-zA-Z][^<>]*>", re.DOTALL)
_LITERAL = re.compile(r"(``|`)(?!`).+?\1", re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_URL = re.compile(r"https?://\S+")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|etc|vs|cf|resp|approx|incl|No|Fig|Sec|al)\.(?=\s)")
_END = re.compile(r"[.!?][\"')\]*_]*(?:\s+|$)")
_ITEM = re.compile(r"^\s*(?:[-*+]|\d+[.)]|>|#+)\s+")
_RULE = re.compile(r"^\s*\|?[\s:|-]+\|[\s:|-]*$")
_ALIGNED = re.compile(r"\S {3,}\S")
"""A row of a table that is aligned by spaces, as docstrings have them."""
_WORD = re.compile(r"[^\W_][\w'.,/%+-]*")
_POINTS = re.compile(
    r"(?:(?:see|as|like|same|the same|of|in|for|from|to|by|with|without|and|or)\b[^.:;]{0,60}|likewise|ditto|idempotent)\.?",
    re.IGNORECASE,
)
"""A whole docstring that begins with one of these words and soon ends: "As in FairQueue.", "Of one core.", "See Queue."."""


def paragraphs(markdown: str) -> Iterator[str]:
    """What is read in one go: a paragraph, an item of a list, a cell of a table. Blocks of code are left out."""
    text = _HTML.sub(" ", _FENCE.sub("\n\n", markdown))
    text = _LITERAL.sub("code", text)
    text = _URL.sub("link", _LINK.sub(r"\1", text))
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        table = line.lstrip().startswith("|")
        indented = line.startswith("    ") and not lines
        if (not line.strip() or table or indented or _ITEM.match(line) or _ALIGNED.search(line)) and lines:
            yield " ".join(lines)
            lines = []
        if table:
            yield from (cell for cell in line.strip().strip("|").split("|") if not _RULE.match(line))
        elif line.strip() and not indented:
            lines.append(_ITEM.sub("", line).strip())


def sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph. Stops within numbers, names of files, addresses and abbreviations end none."""
    guarded = _ABBREVIATION.sub(lambda found: found[0].replace(".", "·"), paragraph)
    return [sentence for sentence in _END.split(guarded) if sentence.strip()]


def words(sentence: str) -> int:
    return len(_WORD.findall(sentence))


def long_sentences(markdown: str) -> list[str]:
    """The sentences with more than `MAX_WORDS` words."""
    return [sentence for paragraph in paragraphs(markdown) for sentence in sentences(paragraph) if words(sentence) > MAX_WORDS]


def only_points_elsewhere(docstring: str) -> bool:
    """Whether it says nothing that can be read on its own."""
    return _POINTS.fullmatch(" ".join(_LITERAL.sub("code", docstring).split())) is not None


def public_docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings of a module and of its public names: classes, functions, and what is assigned to."""
    yield from _docstrings_of(ast.parse(path.read_text()))


def _docstrings_of(owner: ast.Module | ast.ClassDef) -> Iterator[tuple[int, str]]:
    docstring = ast.get_docstring(owner)
    if docstring:
        yield owner.body[0].lineno, docstring
    for before, node in zip([None, *owner.body], owner.body, strict=False):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _docstrings_of(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.body[0].lineno, docstring
        elif _is_text(node) and _is_public_assignment(before):
            assert isinstance(node, ast.Expr)
            assert isinstance(node.value, ast.Constant)
            yield node.lineno, str(node.value.value)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_public_assignment(node: ast.stmt | None) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(isinstance(target, ast.Name) and not target.id.startswith("_") for target in targets)


def text_of(page: Path) -> str:
    """What is read of a page: all of it, but of the changelog the newest section, since what was released is not rewritten."""
    text = page.read_text()
    return text.split("\n## ")[1] if page.name == "CHANGELOG.md" else text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_of_pages_are_short(page: Path) -> None:
    assert long_sentences(text_of(page)) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_sentences_of_public_docstrings_are_short(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {sentence}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, docstring in public_docstrings(path)
        for sentence in long_sentences(docstring)
    ]
    assert found == []


@pytest.mark.parametrize("package", PACKAGES)
def test_public_docstrings_stand_alone(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {docstring}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, docstring in public_docstrings(path)
        if only_points_elsewhere(docstring)
    ]
    assert found == []


def test_sentences_are_told_apart() -> None:
    text = """It takes 0.97 s, e.g. in `a.b. c` or docs/api.md. Is that
much? **No.** See [the page. Really](a.md#b.c) of v1.2!

- one item
  that goes on
- another. And more

| a cell | a second. A third |
|---|---|

```sh
This is code. It is not read.
```
<!-- nor this. -->
RUNNING     holds blocks
WAITING     holds none
"""
    assert [sentence for paragraph in paragraphs(text) for sentence in sentences(paragraph)] == [
        "It takes 0.97 s, e·g· in code or docs/api.md",
        "Is that much",
        "**No",
        "See the page",
        "Really of v1.2",
        "one item that goes on",
        "another",
        "And more",
        " a cell ",
        " a second",
        "A third ",
        "RUNNING     holds blocks",
        "WAITING     holds none",
    ]


def test_a_long_sentence_is_found_wherever_it_stands() -> None:
    long, short = " ".join(["word"] * 41), " ".join(["word"] * 40)
    for before, after in (
        ("", "."),
        ("- ", "\n- another"),
        ("| a | ", " |"),
        ("Before. ", "; `code`."),
        ("> ", ""),
        ("A `b", "` c"),
    ):
        found = long_sentences(f"{before}{long}{after}")
        assert bool(found) is not before.endswith("`b"), before
    assert long_sentences(f"{short}. {short}! {short}") == []
    assert long_sentences(f"```\n{long}\n```\n    {long}\n") == []


@pytest.mark.parametrize(
    "docstring",
    ["As in FairQueue.", "Likewise.", "Of the whole.", "See `Queue.take`.", "Of one core.", "In watts.", "The same for V."],
)
def test_a_docstring_that_only_points_elsewhere_is_found(docstring: str) -> None:
    assert only_points_elsewhere(docstring)


@pytest.mark.parametrize(
    "docstring",
    [
        "Tokens in the whole pool.",
        "Return the sum, as in vLLM.",
        "In bytes: the pool's size. It never changes.",
        "Seen by nobody.",
    ],
)
def test_a_docstring_that_stands_alone_passes(docstring: str) -> None:
    assert not only_points_elsewhere(docstring)


MODULE = '''"""Module."""
A = 1
"""Constant."""
_B = 2
"""Private."""
class C:
    """Class."""
    x: int
    """Field."""
    def f(self):
        """Method."""
    def _g(self):
        """Private."""
class _D:
    """Private."""
async def h():
    """Function."""
    def inner():
        """Private."""
'''


def test_public_docstrings_are_those_of_public_names(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(MODULE)
    assert [text for _, text in public_docstrings(path)] == ["Module.", "Constant.", "Class.", "Field.", "Method.", "Function."]
