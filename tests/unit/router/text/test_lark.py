"""What is found in grammars of clients: what their strings, patterns and comments hold is not meant."""

from __future__ import annotations

import pytest

from protocol.errors import InvalidRequestError
from router.text.grammar import lark_rule
from router.text.lark import largest_token_id, sets_temperature


@pytest.mark.parametrize(
    "grammar",
    [
        "start[temperature=2]: /a/",
        "start [ capture , temperature = 0.5 ] : /a/",
        '?start[stop="]", temperature=1]: "a"',
        "start: a // the rest\na[stop=/\\/]/, temperature=1]: /x/",
    ],
)
def test_a_temperature_of_a_rule_is_refused(grammar: str) -> None:
    """It was accepted and did nothing: an answer has one temperature."""
    with pytest.raises(InvalidRequestError, match="`guided_grammar` must not set a rule's temperature") as refused:
        lark_rule(grammar, "guided_grammar")
    assert refused.value.param == "guided_grammar"


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a[temperature=1]:" /[temperature=1]:/',
        'start: "\\"[temperature=1]" // [temperature=1]:\n# [temperature=1]:',
        'start: %json {"const": "[temperature=1]"}',
        'start[max_tokens=5]: [temperature] "="\ntemperature: "a"',
        "start[stop=/temperature=/]: /a/",
    ],
)
def test_what_only_looks_like_a_temperature_is_none(grammar: str) -> None:
    assert not sets_temperature(grammar)
    assert lark_rule(grammar, "guided_grammar").param == "guided_grammar"


@pytest.mark.parametrize(
    ("grammar", "largest"),
    [
        ("start: <[5]>", 5),
        ("start: <[1,30-70,9]> | <[^80]>", 80),
        ("start: <[007]> <[*]> <|im_end|>", 7),
        ('start: "<[5]>" /<[6]>/ // <[7]>', -1),
        ('start: "a"', -1),
    ],
)
def test_the_largest_token_of_a_grammar(grammar: str, largest: int) -> None:
    assert largest_token_id(grammar) == largest


def test_tokens_outside_of_the_vocabulary_are_refused() -> None:
    """Workers refused them, who can't tell which field is to blame."""
    rule = lark_rule("start: <[10-99]>", "structured_outputs.grammar")
    rule.check_tokens(100)
    with pytest.raises(InvalidRequestError, match=r"`structured_outputs\.grammar` .* from 0 to 98; got 99") as refused:
        rule.check_tokens(99)
    assert refused.value.param == "structured_outputs.grammar"
