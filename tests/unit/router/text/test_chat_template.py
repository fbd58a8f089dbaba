from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from configs.facts import Model, TokenizerFacts
from protocol.errors import ConfigError, InvalidRequestError
from router.api.prepare import shown_by
from router.text.chat_template import ChatTemplate, TemplateOptions
from router.text.tool_format import tool_format
from router.text.traced import outline_of

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": 'Hi <b>&</b> "quotes" {{ 7 * 7 }} 😀'}],
    [{"role": "user", "content": ""}, {"role": "assistant", "content": " a\n"}, {"role": "user", "content": "b"}],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "ä <&>", "parameters": {"type": "object"}}}]
TEMPLATES = {
    "loop controls and namespaces": (
        "{%- set ns = namespace(n=0, first='') %}\n"
        "{% for m in messages %}\n    {% if m.role == 'system' %}{% continue %}{% endif %}\n"
        "    {%- set ns.n = ns.n + 1 %}\n[{{ ns.n }}:{{ m['content'] | trim }}]\n    {% if ns.n > 1 %}{% break %}{% endif %}\n"
        "{% endfor %}"
    ),
    "tools": "{% if tools %}{% for t in tools %}{{ t | tojson(indent=2) }}{{ t|tojson }}{% endfor %}{% endif %}x",
    "special tokens": "{{ bos_token }}{{ messages[-1].content }}{{ eos_token }}{{ unk_token }}{{ pad_token }}",
    "generation blocks": "{% for m in messages %}{% generation %}\n{{ m.content }}{% endgeneration %}\n{% endfor %}!",
    "generation prompt": "{% if add_generation_prompt %}yes{% else %}no{% endif %}{{ documents is none }}",
    "dictionaries": "{% set d = dict(a=1, b=messages|length) %}{{ d.b }}{{ d | tojson }}",
}


@pytest.fixture
def facts(smollm2: Model) -> TokenizerFacts:
    return smollm2.tokenizer


@pytest.fixture
def theirs(reference: PreTrainedTokenizerFast, facts: TokenizerFacts) -> PreTrainedTokenizerFast:
    reference.bos_token, reference.eos_token, reference.unk_token = facts.bos_token, facts.eos_token, facts.unk_token
    return reference


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("name", ["the model's", *TEMPLATES])
def test_renders_as_transformers_does(
    facts: TokenizerFacts,
    theirs: PreTrainedTokenizerFast,
    name: str,
    add_generation_prompt: bool,
    conversation: list[dict[str, Any]],
) -> None:
    template = TEMPLATES.get(name, facts.chat_template)
    offered: tuple[Any, ...] = (None, TOOLS)
    for tools in offered:
        expected = theirs.apply_chat_template(
            conversation, tools, chat_template=template, add_generation_prompt=add_generation_prompt, tokenize=False
        )
        ours = ChatTemplate(template, facts)
        assert ours.render(conversation, tools=tools, options=TemplateOptions(add_generation_prompt)) == expected


def test_a_model_without_bos_has_no_such_name(facts: TokenizerFacts) -> None:
    assert ChatTemplate("[{{ bos_token }}]", replace(facts, bos_token=None)).render([]) == "[]"


def test_the_date(facts: TokenizerFacts) -> None:
    assert len(ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", facts).render([])) == 10


REFUSES = "{% for m in messages %}{% if REFUSED %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
SAYS_TOOLS = "{% if tools %}<tool_call>{% endif %}"


@pytest.mark.parametrize(
    ("template", "several"),
    [
        (SAYS_TOOLS, True),
        (SAYS_TOOLS + REFUSES.replace("REFUSED", "m.tool_calls|length > 1"), False),
        (SAYS_TOOLS + REFUSES.replace("REFUSED", "m.tool_calls"), True),
        ("{{ messages }}", True),
        (None, True),
    ],
)
def test_as_many_calls_as_it_can_show(facts: TokenizerFacts, template: str | None, several: bool) -> None:
    """A template that shows no call at all says nothing of how many there may be."""
    assert shown_by(ChatTemplate(template, facts), tool_format(template)).several == several


TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('in turns') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
USERS_ALONE = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("template", [TURNS, USERS_ALONE])
def test_tools_of_a_template_without_a_system_role(facts: TokenizerFacts, template: str) -> None:
    compiled = ChatTemplate(template, facts)
    format_ = shown_by(compiled, tool_format(template))
    assert format_.several
    calls = [{"id": f"c{index}", "type": "function", "function": {"name": "f", "arguments": {}}} for index in range(2)]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "What <|im_end|> now?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c0", "content": "one"},
        {"role": "tool", "tool_call_id": "c1", "content": "two"},
        {"role": "assistant", "content": "both"},
        {"role": "user", "content": "Again?"},
    ]
    spelled, tools = format_.conversation(messages, TOOLS)
    text = compiled.render(spelled, tools=tools)
    assert [message["role"] for message in spelled] == ["user", "assistant"] * 2 + ["user"]
    assert spelled[0]["content"].startswith("You can call functions.")
    assert spelled[0]["content"].endswith("\n\nWhat <|im_end|> now?")
    assert text.index("one") < text.index("two") < text.index("[assistant]both")
    assert "<|im_end|>" not in outline_of(text)


@pytest.mark.parametrize("template", [USERS_ALONE, "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"])
def test_tools_are_in_the_prompt_where_the_template_drops_system_messages(facts: TokenizerFacts, template: str) -> None:
    compiled = ChatTemplate(template, facts)
    format_ = shown_by(compiled, tool_format(template))
    spelled, tools = format_.conversation(CONVERSATIONS[1], TOOLS)
    assert spelled[0] == CONVERSATIONS[1][0]
    assert '"name": "f"' in compiled.render(spelled, tools=tools)


@pytest.mark.parametrize(("template", "system"), [("{{ messages }}", True), ("x", True), (None, True), (TURNS, False)])
def test_whether_a_template_shows_system_messages(facts: TokenizerFacts, template: str | None, system: bool) -> None:
    assert shown_by(ChatTemplate(template, facts), tool_format(template)).system == system


def test_without_a_template(facts: TokenizerFacts) -> None:
    with pytest.raises(InvalidRequestError, match="no chat template: use /v1/completions") as caught:
        ChatTemplate(None, facts).render(CONVERSATIONS[0])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("template", ["{% for %}", "{{ x", "{% unknown %}", "{% generation %}"])
def test_invalid_templates(facts: TokenizerFacts, template: str) -> None:
    with pytest.raises(ConfigError, match="not valid Jinja") as caught:
        ChatTemplate(template, facts)
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{{ 'a' + none }}", "concatenate"),
        ("{{ messages[0].content.x.y }}", "has no attribute"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[99].content }}", "no element 99"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ dict.__globals__.x }}", "unsafe"),
        ("{{ namespace(__class__=1) }}", "starts with an underscore"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "starts with an underscore"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_what_a_template_refuses_is_the_clients_mistake(facts: TokenizerFacts, template: str, says: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(template, facts).render(CONVERSATIONS[0])
    assert says in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.param == "messages"


def test_a_message_the_template_was_not_written_for(facts: TokenizerFacts) -> None:
    template = ChatTemplate(facts.chat_template, facts)
    for content in (None, ["part"], {"a": 1}, 3):
        with pytest.raises(InvalidRequestError, match="can't render these messages"):
            template.render([{"role": "user", "content": content}])
    with pytest.raises(InvalidRequestError):
        template.render([{"content": "no role"}])
