"""Tool calls: what a format's grammar lets through is what its parser finds, however the text is cut."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import InvalidRequestError
from protocol.sampling import MAX_GRAMMAR_CHARS
from router.api.structured import MAX_TOOLS
from router.text.grammar import json_answer, json_rule
from router.text.tool_calls import ToolCallDelta, ToolCallParser, whole_calls
from router.text.tool_format import ToolFormat, ToolWishes, tool_format

HERMES = tool_format("{% if tools %}<tool_call>{% endif %}")
LLAMA3 = tool_format('{% if tools %}{"name": function name, "parameters": dictionary}{% endif %}')
SPELLED = tool_format("{{ messages }}")
FORMATS = [HERMES, LLAMA3]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


TOOLS = (tool("add", a={"type": "integer"}, b={"type": "integer"}), tool("say", text={"type": "string"}), tool("stop"))
NAMES = ("add", "say", "stop")
NODE = {
    "type": "object",
    "properties": {"next": {"$ref": "#/$defs/node"}, "of": {"$ref": "#/$defs/kind"}},
    "additionalProperties": False,
}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def wishes(names: tuple[str, ...] = NAMES, *, required: bool = False, parallel: bool = True) -> ToolWishes:
    return ToolWishes(TOOLS, names, frozenset(NAMES), required, parallel)


class Bytes:
    """One token a byte: the grammar alone decides."""

    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


VOCABULARY = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


def follows(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(VOCABULARY, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def written(format_: ToolFormat, calls: list[tuple[str, str]]) -> str:
    spelled = [f"{format_.begin}{json.dumps(name)}{format_.middle}{arguments}{format_.end}" for name, arguments in calls]
    return format_.separator.join(spelled)


def parsed(format_: ToolFormat, text: str, cuts: list[int]) -> tuple[str, list[tuple[str, str]], list[ToolCallDelta]]:
    parser = ToolCallParser(replace(format_, names=NAMES))
    content, pieces = "", list[ToolCallDelta]()
    borders = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    for start, end in pairwise(borders):
        said, calls = parser.push(text[start:end])
        content += said
        pieces += calls
    content += parser.flush()
    return content, [(name, arguments) for _, name, arguments in whole_calls(pieces)], pieces


texts = st.text(st.sampled_from(' \n<tool_call>{"nameé😀}[]\\;:/'), max_size=30)
free_texts = texts.filter(lambda text: "<tool_call>" not in text)
calls = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.builds(lambda a, b: f'{{"a": {a}, "b": {b}}}', st.integers(), st.integers())),
        st.tuples(st.just("say"), texts.map(lambda text: json.dumps({"text": text}, ensure_ascii=False))),
        st.just(("stop", "{}")),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=300, deadline=None)
@given(format_=st.sampled_from(FORMATS), calls=calls, cuts=st.lists(st.integers(1, 300)))
def test_calls_are_allowed_and_found(format_: ToolFormat, calls: list[tuple[str, str]], cuts: list[int]) -> None:
    text = written(format_, calls)
    assert follows(format_.grammar(wishes(), None), text)
    assert follows(format_.grammar(wishes(required=True), None), text)
    content, found, pieces = parsed(format_, text, cuts)
    assert content == ""
    assert found == calls
    assert [piece.index for piece in pieces] == sorted(piece.index for piece in pieces)
    assert len({piece.call_id for piece in pieces if piece.call_id}) == len(calls), "each has an id of its own"
    assert follows(format_.grammar(wishes(parallel=False), None), text) == (len(calls) == 1)


def test_blanks_before_a_call_are_looked_at_once() -> None:
    """Each token looked through all blanks before it again: an answer of 32,000 blank tokens took seconds."""
    parser = ToolCallParser(replace(HERMES, names=NAMES))
    for _ in range(3):
        assert parser.push("  \n ") == ("", ())
        assert parser.stays_content("a"), "nothing waits to be looked at again"
    assert parser.push("a") == ("  \n " * 3 + "a", ())
    held = ToolCallParser(replace(HERMES, names=NAMES))
    assert held.push("  \n") == ("", ())
    assert held.flush() == "  \n"


def test_arguments_are_put_together_once() -> None:
    """Piece by piece, a call of 120,000 pieces was copied 120,000 times."""
    copied: list[int] = []

    class Noted(str):
        __slots__ = ()

        def __radd__(self, before: str) -> str:
            copied.append(len(before))
            return before.__add__(self)

    pieces = [ToolCallDelta(0, "id", "f", ""), *(ToolCallDelta(0, None, None, Noted("abcd")) for _ in range(100))]
    [call] = whole_calls(pieces)
    assert call == ("id", "f", "abcd" * 100)
    assert sum(copied) == 0


@settings(max_examples=300, deadline=None)
@given(text=free_texts, calls=st.one_of(st.just([]), calls), cuts=st.lists(st.integers(1, 300)))
def test_text_before_calls(text: str, calls: list[tuple[str, str]], cuts: list[int]) -> None:
    whole = text + written(HERMES, calls) if calls else text
    assert follows(HERMES.grammar(wishes(), None), whole)
    content, found, _ = parsed(HERMES, whole, cuts)
    assert found == calls
    assert content == (text if not calls else text.removesuffix("\n") if text.strip() else "")
    assert follows(HERMES.grammar(wishes(()), None), whole) == (not calls), "tool_choice none"


@settings(max_examples=200, deadline=None)
@given(text=texts, cuts=st.lists(st.integers(1, 40)))
def test_text_of_llama_models(text: str, cuts: list[int]) -> None:
    allowed = follows(LLAMA3.grammar(wishes(), None), text)
    assert allowed == (not text.startswith("{"))
    content, found, _ = parsed(LLAMA3, text, cuts)
    assert (content, found) == (text, [])


@pytest.mark.parametrize("text", ['{"a": 1}', '{"name": "add", "parameters": {"a": 1, "b": 2}}', "{", "", "a {\n"])
def test_any_text_of_llama_models_where_no_call_can_be_made(text: str) -> None:
    """JSON that a client asked for in words was forbidden by `tool_choice: none`."""
    assert follows(LLAMA3.grammar(wishes(()), None), text)


@pytest.mark.parametrize("format_", FORMATS)
def test_arguments_follow_the_schema(format_: ToolFormat) -> None:
    grammar = format_.grammar(wishes(), None)
    assert not follows(grammar, written(format_, [("add", '{"a": 1}')]))
    assert not follows(grammar, written(format_, [("add", '{"a": 1, "b": "two"}')]))
    assert not follows(grammar, written(format_, [("subtract", '{"a": 1, "b": 2}')]))
    assert not follows(format_.grammar(wishes(("say",), required=True), None), written(format_, [("stop", "{}")]))
    assert not follows(format_.grammar(wishes(required=True), None), "Hello")


@pytest.mark.parametrize("format_", FORMATS)
def test_content_may_have_a_form_of_its_own(format_: ToolFormat) -> None:
    grammar = format_.grammar(wishes(), json_rule({"type": "array", "items": {"type": "integer"}}))
    assert follows(grammar, "[1, 2]")
    assert follows(grammar, written(format_, [("stop", "{}")]))
    assert not follows(grammar, "Hello")


@pytest.mark.parametrize("pattern", [r"/[\s\S]+/", r"/(.|\n)*/", r"/.*/"])
def test_content_of_a_pattern_has_no_calls_of_its_own(pattern: str) -> None:
    grammar = HERMES.grammar(wishes(), pattern)
    assert follows(grammar, "Hello")
    assert follows(grammar, written(HERMES, [("stop", "{}")]))
    for wrong in ('{"name": foo, "arguments": {}}', '{"name": "add", "arguments": {}}', ""):
        assert not follows(grammar, f"<tool_call>\n{wrong}")
        assert not follows(HERMES.grammar(wishes(()), pattern), f"<tool_call>\n{wrong}"), "tool_choice none"


@given(
    parts=st.lists(
        st.sampled_from(
            [
                *(f'<tool_call>\n{{"name": {name}, "arguments": ' for name in ("foo", '"g"', "", "[")),
                "<tool_call>\n",
                "\n",
                '"add',
                "a",
            ]
        ),
        max_size=5,
    ),
    cuts=st.lists(st.integers(1, 200)),
)
def test_a_call_of_nothing_that_is_offered_is_content(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    assert parsed(HERMES, text, cuts) == (text, [], [])


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize(
    "content", ['{"name": "Bob", "age": 3}', '{"name": "add", "age": 3}', '{"a": {"parameters": {}}}', "{}"]
)
def test_content_that_begins_as_a_call_does_stays_content(format_: ToolFormat, content: str) -> None:
    grammar = format_.grammar(wishes(), json_rule({"type": "object"}))
    assert follows(grammar, content)
    assert parsed(format_, content, [*range(1, 30)]) == (content, [], [])
    for call in [("add", '{"a": 1, "b": 2}'), ("stop", "{}")]:
        assert follows(grammar, written(format_, [call]))
        assert parsed(format_, written(format_, [call]), [3, 9])[:2] == ("", [call])


@pytest.mark.parametrize("top", [{"$ref": "#/$defs/node"}, NODE])
@pytest.mark.parametrize("own", [{}, {"$id": "https://example.org/walk"}, {"$id": "walk", "$schema": DRAFT_7}])
def test_a_schema_that_names_its_own_parts_is_followed_within_a_call(own: dict[str, str], top: dict[str, Any]) -> None:
    schema = {**own, **top, "$defs": {"node": NODE, "kind": {"enum": ["a", "b"]}}}
    tools = ({"type": "function", "function": {"name": "walk", "description": "", "parameters": schema}},)
    asked = ToolWishes(tools, ("walk",), frozenset({"walk"}), required=False, parallel=False)
    for format_ in FORMATS:
        grammar = format_.grammar(asked, json_rule({"type": "object"}))
        assert follows(grammar, written(format_, [("walk", '{"next": {"next": {"of": "b"}}, "of": "a"}')]))
    assert not follows(HERMES.grammar(asked, None), written(HERMES, [("walk", '{"of": "c"}')]))


@pytest.mark.parametrize(
    "parameters", [{"properties": {"a": {"type": "integer"}}}, {"type": ["object", "null"]}, {"minProperties": 0}]
)
@pytest.mark.parametrize("format_", FORMATS)
def test_arguments_are_an_object_whatever_the_schema_leaves_open(format_: ToolFormat, parameters: dict[str, Any]) -> None:
    tools = ({"type": "function", "function": {"name": "f", "description": "", "parameters": parameters}},)
    grammar = format_.grammar(ToolWishes(tools, ("f",), frozenset(), required=True, parallel=False), None)
    assert follows(grammar, written(format_, [("f", '{"a": 1}')]))
    for other in ("null", "3", '"hi"', "[1]"):
        assert not follows(grammar, written(format_, [("f", other)]))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "password"},
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        {"type": "string", "format": "email", "pattern": r"^(?!\.)(?!.*\.\.)[a-z.]+@[a-z.]+$"},
        {"anyOf": [{"type": "null"}, {"allOf": [{"type": "string"}, {"pattern": r"\bid-\d+\b"}]}]},
        {"type": "array", "items": {"type": "string", "pattern": r"^([a-z])[^\0]\1$"}},
        {"type": "object", "patternProperties": {"^(?!_)": {"type": "integer"}}, "additionalProperties": False},
        {"type": "array", "items": [{"type": "string", "pattern": "^(?!a)b"}]},
        {"type": "array", "items": [{"type": "string"}], "additionalItems": {"type": "string", "pattern": "^(?!a)b"}},
        *(
            {"type": "string", "pattern": pattern}
            for pattern in (r"^[^[\]]+$", "[[]", "[]", "[^]", "[a&&b]", "^{.*}$", "${", "x{", "a{,3}", r"\p{L}{", "x{1,2")
        ),
        *({"type": "string", "pattern": pattern} for pattern in (r"^[a-z\s-']+$", r"[\p{L}-']", r"\uD83D\uDE00")),
    ],
)
def test_what_cannot_be_followed_is_left_out_where_a_tool_is_not_strict(schema: dict[str, Any]) -> None:
    tools = (tool("f", value=schema),)
    for strict in (frozenset[str](), frozenset({"f"})):
        grammar = HERMES.grammar(ToolWishes(tools, ("f",), strict, required=True, parallel=False), None)
        assert (llguidance.LLMatcher.validate_grammar(grammar, VOCABULARY) != "") == bool(strict)


def test_a_kind_of_characters_is_no_end_of_a_range() -> None:
    r"""`[+-\d]` is a plus, a minus or a digit in ECMAScript; llguidance takes it for something that no client means."""
    tools = (tool("f", a={"type": "string", "pattern": r"^[+-\d]$"}, b={"type": "string", "pattern": r"^[\w.-]$"}),)
    grammar = HERMES.grammar(ToolWishes(tools, ("f",), frozenset(), required=True, parallel=False), None)
    for sign in "+-5":
        assert follows(grammar, written(HERMES, [("f", json.dumps({"a": sign, "b": "-"}))]))
    assert not follows(grammar, written(HERMES, [("f", json.dumps({"a": "+", "b": "+"}))]))


def test_half_of_a_surrogate_pair_is_refused_in_words_for_clients() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        json_answer({"const": "\ud800"}, "guided_json").grammar()
    assert "%llguidance" not in refused.value.message


def test_patterns_that_can_be_followed_are_followed_where_a_tool_is_not_strict() -> None:
    readable = [r"^\\b+(?:[(?:]|(?i)k|(?<two>\x41))\z", r"^[<{(?!\]]{2}\{\p{Lu}{1,}\x{41}[^a]$"]
    named = {"^(?<!a)": {"type": "integer"}, "^b": {"type": "string", "pattern": "^c$"}}
    tools = (
        tool("f", a={"pattern": readable[0], "type": "string"}, b={"pattern": readable[1], "type": "string"}),
        tool("g", a={"type": "object", "patternProperties": named, "additionalProperties": False}),
    )
    grammar = HERMES.grammar(ToolWishes(tools, ("f", "g"), frozenset(), required=True, parallel=False), None)

    def allowed(name: str, **arguments: Any) -> bool:
        return follows(grammar, written(HERMES, [(name, json.dumps(arguments))]))

    assert allowed("f", a="\\bbK", b="<{{BA]")
    assert not allowed("f", a="\\", b="<{{BA]")
    assert not allowed("f", a="\\bA", b="<{BA]")
    assert allowed("g", a={"b": "c", "other": 1})
    assert not allowed("g", a={"b": "d"}), "the names that can be told are held to"


DESCRIBED = {"type": "string", "description": "ö" * 240, "title": "A", "examples": ["a"], "default": "b", "$comment": "c"}
NAMED_AS_ANNOTATIONS = {"description": {"enum": ["ö", "日"]}, "title": {"const": {"title": "T", "default": 1}}}


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("strict", [False, True])
def test_as_many_tools_as_there_may_be_each_well_described(format_: ToolFormat, strict: bool) -> None:
    """What a schema says to people was in the grammar, and 128 tools were refused for its size."""
    name = "f" * 60
    described = {f"p{index}": DESCRIBED for index in range(6)} | {"all": {"allOf": [DESCRIBED]}, "list": {"items": DESCRIBED}}
    tools = tuple(tool(f"{name}{index:03}", **described) for index in range(MAX_TOOLS))
    names = tuple(each["function"]["name"] for each in tools)
    asked = ToolWishes(tools, names, frozenset(names) if strict else frozenset(), required=True, parallel=True)
    assert len(format_.grammar(asked, None)) < MAX_GRAMMAR_CHARS


@pytest.mark.parametrize("format_", FORMATS)
def test_what_is_named_as_an_annotation_is_followed(format_: ToolFormat) -> None:
    asked = ToolWishes((tool("f", **NAMED_AS_ANNOTATIONS),), ("f",), frozenset({"f"}), required=True, parallel=True)
    grammar = format_.grammar(asked, None)
    for arguments, allowed in [
        ('{"description": "日", "title": {"title": "T", "default": 1}}', True),
        ('{"description": "a", "title": {"title": "T", "default": 1}}', False),
        ('{"description": "ö", "title": {}}', False),
    ]:
        assert follows(grammar, written(format_, [("f", arguments)])) == allowed


@pytest.mark.parametrize("format_", FORMATS)
def test_one_call_where_the_template_shows_no_more(format_: ToolFormat) -> None:
    grammar = replace(format_, several=False).grammar(wishes(), None)
    assert follows(grammar, written(format_, [("stop", "{}")]))
    assert not follows(grammar, written(format_, [("stop", "{}"), ("stop", "{}")]))


@pytest.mark.parametrize("format_", FORMATS)
def test_every_cut_is_content_or_calls(format_: ToolFormat) -> None:
    """An answer that reached its limit: nothing of a call is told twice, nothing before its arguments as a call."""
    text = written(format_, [("say", '{"text": "}\\"{"}'), ("stop", "{}")])
    for end in range(len(text)):
        content, found, _ = parsed(format_, text[:end], [end // 2])
        assert not (content and found)
        assert [name for name, _ in found] == ["say", "stop"][: len(found)]
        if found:
            assert '{"text": "}\\"{"}'.startswith(found[0][1])
        else:
            assert content in (text[:end], "")


def test_which_format_a_template_speaks_of() -> None:
    assert HERMES.native
    assert LLAMA3.native
    assert LLAMA3.middle == ', "parameters": '
    assert tool_format(None) == SPELLED
    assert not SPELLED.native
    assert SPELLED.begin == HERMES.begin
    assert not tool_format("{% if tools %}<tool_call>\n<function=example>{% endif %}").native


def test_a_template_without_tools_gets_them_as_text() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
    ]
    spelled, tools = SPELLED.conversation(messages, TOOLS)
    assert tools is None
    assert [message["role"] for message in spelled] == ["system", "user", "assistant", "user"]
    assert spelled[0]["content"].startswith("Be brief.\n\n")
    assert all(json.dumps(tool["function"]) in spelled[0]["content"] for tool in TOOLS)
    assert spelled[2]["content"] == written(SPELLED, [("add", '{"a": 1, "b": 2}')])
    assert "3" in spelled[3]["content"]
    first, _ = SPELLED.conversation(messages[1:], TOOLS)
    assert [message["role"] for message in first[:2]] == ["system", "user"]
    assert SPELLED.conversation(messages[1:2], ()) == (messages[1:2], None)
    assert HERMES.conversation(messages, TOOLS) == (messages, TOOLS)
