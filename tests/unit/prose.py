"""Finds sentences that are too long, and docstrings that only point elsewhere.

Prose is what a reader reads: paragraphs, list items and cells of tables, without blocks of code. A code span, a link's target and a
number count as one word at most.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

MAX_WORDS = 40

_FENCE = re.compile(r"^[ >]*(```|~~~).*?^[ >]*\1[ ]*$", re.MULTILINE | re.DOTALL)
_HTML = re.compile(r"<!--.*?-->|</?[a-zA-Z][^<>]*>", re.DOTALL)
_LITERAL = re.compile(r"(``|`)(?!`).+?\1", re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_URL = re.compile(r"https?://\S+")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|etc|vs|cf|resp|approx|incl|No|Fig|Sec|al)\.(?=\s)")
_END = re.compile(r"[.!?][\"'”’)\]]*(?:\s+|$)")
_ITEM = re.compile(r"^\s*(?:[-*+]|\d+[.)]|>|#+)\s+")
_RULE = re.compile(r"^\s*\|?[\s:|-]+\|[\s:|-]*$")
_WORD = re.compile(r"[^\W_][\w'’.,/%+-]*")
_POINTS = re.compile(
    r"(?:(?:see|as|like|likewise|same|ditto|of|in|for|from|to|by|with|without|and|or)\b[^.:;,]{0,40}|likewise|ditto)\.?", re.IGNORECASE
)
"""A whole docstring that begins with one of these words and ends after a few: "As in FairQueue.", "Of one core."."""


def paragraphs(markdown: str) -> Iterator[str]:
    """What is read in one go: a paragraph, an item of a list, a cell of a table. Code is left out, and a code span is one word."""
    text = _HTML.sub(" ", _FENCE.sub("\n\n", markdown))
    text = _LITERAL.sub("code", text)
    text = _URL.sub("link", _LINK.sub(r"\1", text))
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        table = line.lstrip().startswith("|")
        indented = line.startswith("    ") and not lines
        if (not line.strip() or table or indented or _ITEM.match(line)) and lines:
            yield " ".join(lines)
            lines = []
        if table:
            yield from (cell for cell in line.strip().strip("|").split("|") if not _RULE.match(line))
        elif line.strip() and not indented:
            lines.append(_ITEM.sub("", line).strip())


def sentences(paragraph: str) -> list[str]:
    """Split where a full stop, question mark, exclamation mark, colon or semicolon ends a clause that can stand alone."""
    guarded = _ABBREVIATION.sub(lambda found: found[0].replace(".", "·"), paragraph)
    return [sentence for sentence in _END.split(guarded) if sentence.strip()]


def words(sentence: str) -> int:
    return len(_WORD.findall(sentence))


def long_sentences(markdown: str) -> list[str]:
    """The sentences with more than `MAX_WORDS` words."""
    return [
        sentence for paragraph in paragraphs(markdown) for sentence in sentences(paragraph) if words(sentence) > MAX_WORDS
    ]


def only_points_elsewhere(docstring: str) -> bool:
    """Whether it says nothing that can be read on its own."""
    return _POINTS.fullmatch(" ".join(docstring.split())) is not None


def public_docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings of a module and of its public names, attributes included."""
    tree = ast.parse(path.read_text())
    yield from _docstrings_of(tree)


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
