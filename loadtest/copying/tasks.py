"""Prompts for load tests whose answers repeat much of what stands in them, as much real work does. Pure but for reading.

Three kinds take turns:

    quotes    a text, then its summary, which begins to quote it
    edits     a function, then the same function with another name in it
    answers   several passages with numbers, then a question, and the beginning of an answer in the words of one of them

The texts are older than 1928, the code is Tandem's own. Each prompt leads up to the copy, so that also a small model copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import resources

import numpy as np

from protocol.errors import InvalidRequestError

KINDS = ("quotes", "edits", "answers")
_SOURCES = 3
"""Passages of a prompt with a question."""
_EXAMPLES = 1
"""Edits that are shown before the one that is wanted."""


def paragraphs(text: str) -> list[str]:
    """Return what blank lines separate. Raises InvalidRequestError if there are fewer than a prompt needs."""
    found = [each.strip() for each in text.split("\n\n") if each.strip()]
    if len(found) < _SOURCES:
        raise InvalidRequestError(f"the text needs at least {_SOURCES} paragraphs, apart by blank lines", param="dataset_path")
    return found


def packaged(name: str) -> list[str]:
    """Return the paragraphs of a text that comes with Tandem: `prose`, or the functions of `code`."""
    return paragraphs(resources.files(__package__).joinpath(f"{name}.txt").read_text(encoding="utf-8"))


def copying_prompts(num: int, prose: Sequence[str], rng: np.random.Generator) -> list[str]:
    """Return so many prompts of all kinds in turns, of paragraphs, and of functions, that are drawn at random."""
    code = packaged("code")
    makers: dict[str, Callable[[np.random.Generator], str]] = {
        "quotes": lambda rng: _quotes(_drawn(prose, 2, rng)),
        "edits": lambda rng: _edits(_drawn(code, _EXAMPLES + 1, rng)),
        "answers": lambda rng: _answers(_drawn(prose, _SOURCES, rng), int(rng.integers(_SOURCES))),
    }
    return [makers[KINDS[number % len(KINDS)]](rng) for number in range(num)]


def _quotes(texts: Sequence[str]) -> str:
    shown, wanted = texts
    return (
        f"Text:\n{shown}\n\nThe text says, word for word:\n{shown}\n\n"
        f"Text:\n{wanted}\n\nThe text says, word for word:\n{' '.join(wanted.split()[:4])}"
    )


def _edits(functions: Sequence[str]) -> str:
    *shown, wanted = functions
    examples = [f"Code:\n{each}\n\nThe same code with `result` renamed to `found`:\n{_renamed(each)}" for each in shown]
    begun = _renamed(wanted).splitlines()[0]
    return "\n\n".join([*examples, f"Code:\n{wanted}\n\nThe same code with `result` renamed to `found`:\n{begun}"])


def _renamed(function: str) -> str:
    return function.replace("result", "found")


def _answers(texts: Sequence[str], chosen: int) -> str:
    passages = "\n\n".join(f"[{number}] {text}" for number, text in enumerate(texts, start=1))
    begun = " ".join(texts[chosen].split()[:5])
    return f"{passages}\n\nQuestion: What does passage [{chosen + 1}] say?\nAnswer: Passage [{chosen + 1}] says: {begun}"


def _drawn(texts: Sequence[str], num: int, rng: np.random.Generator) -> list[str]:
    return [texts[index] for index in rng.permutation(len(texts))[:num]]
