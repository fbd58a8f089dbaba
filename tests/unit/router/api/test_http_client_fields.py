"""Fields that unmodified clients send, by the `openai` package over real HTTP, in front of scripted workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai.types import chat, responses, shared_params
from pydantic import BaseModel

from configs.facts import Model
from protocol.errors import InvalidRequestError
from router.api.body import Body, check_body
from router.api.chat.body import ChatBody
from router.api.chat.messages import ChatMessage, TextPart
from router.api.completions.body import CompletionBody
from router.api.fields import StreamOptions
from router.api.prepare import Preparer
from router.api.responses.body import ResponsesBody, ResponseStreamOptions, as_chat
from router.api.responses.input import CallItem, CallOutputItem, InputText, MessageItem
from router.api.responses.options import FunctionChoice, FunctionTool, ReasoningOptions, SchemaFormat, TextOptions
from router.api.structured import CalledFunction, Function, JsonSchemaFormat, ResponseFormat, ToolBody, ToolCallBody
from router.text.grammar import AnswerRule
from router.text.tokenizer import Tokenizer

Run = Callable[..., None]
MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
BEGUN: list[Any] = [*MESSAGES, {"role": "assistant", "content": "The capital is "}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def client_of(cluster: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)


def test_metadata_changes_no_answer(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("Paris.")
        async with client_of(cluster) as client:
            for metadata in ({}, {"trace": "1", "user": "x"}):
                answer = await client.chat.completions.create(model="smollm2", messages=MESSAGES, metadata=metadata, seed=1)
                assert answer.choices[0].message.content == "Paris."
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="smollm2", messages=MESSAGES, metadata={"a" * 65: "x"})
            assert caught.value.param == "metadata"
        one, other = (each for each in cluster.prefill[0].seen)
        assert (one.token_ids, one.sampling) == (other.token_ids, other.sampling)
        await cluster.clean()

    run_cluster(test)


def test_a_path_may_end_with_a_slash(run_cluster: Run) -> None:
    """A redirect would name the scheme and the port behind a proxy, and clients send the prompt and the key again there."""

    async def test(cluster: Any) -> None:
        cluster.says("Paris.")
        body = {"model": "smollm2", "messages": MESSAGES}
        for slashes in ("/", "//"):
            answer = await cluster.http.post(f"/v1/chat/completions{slashes}", json=body)
            assert answer.json()["choices"][0]["message"]["content"] == "Paris."
        assert (await cluster.http.get("/v1/models/")).json() == (await cluster.http.get("/v1/models")).json()
        assert (await cluster.http.get("/health/")).json() == {"status": "ok"}
        assert (await cluster.http.post("/admin/scale/", json={})).json()["error"]["param"] == "prefill"
        assert (await cluster.http.get("/v2/")).status_code == 404
        assert (await cluster.http.get("/")).headers["content-type"].startswith("text/html")
        assert (await cluster.http.get("/ops/")).headers["location"].endswith("/ops"), "its files are named relative to it"
        await cluster.clean()

    run_cluster(test)


def test_forms_of_answers_as_vllm_spells_them(run_cluster: Run) -> None:
    forms: list[tuple[dict[str, Any], str]] = [
        ({"guided_json": SCHEMA}, '"city": {"type": "string"}'),
        ({"guided_json": '{"type": "object"}'}, "start: %json"),
        ({"guided_regex": r"\d{4}/\d{2}"}, r"start: /\d{4}\/\d{2}/"),
        ({"guided_choice": ["yes", "no\n"]}, r'start: ("yes" | "no\n")'),
        ({"guided_grammar": 'start: "a" | b\nb: "c"'}, 'start: "a" | b\nb: "c"'),
        ({"structured_outputs": {"json": SCHEMA}}, '"city": {"type": "string"}'),
        ({"structured_outputs": {"json_object": True}}, 'start: %json {"type": "object"'),
        ({"structured_outputs": {"choice": ["yes", "no"], "disable_fallback": True}}, 'start: ("yes" | "no")'),
    ]

    async def test(cluster: Any) -> None:
        cluster.says("anything")
        async with client_of(cluster) as client:
            for fields, _ in forms:
                await client.chat.completions.create(model="smollm2", messages=MESSAGES, extra_body=fields)
                await client.completions.create(model="smollm2", prompt="Count:", extra_body=fields)
            await client.chat.completions.create(model="smollm2", messages=MESSAGES, response_format=FORMAT)
        grammars = [each.sampling.grammar for each in cluster.prefill[0].seen]
        for index, (fields, expected) in enumerate(forms):
            assert expected in grammars[2 * index], fields
            assert grammars[2 * index + 1] == grammars[2 * index]
        assert grammars[0] == grammars[-1], "the same as by response_format"
        await cluster.clean()

    run_cluster(test)


@pytest.mark.parametrize(
    "hard",
    [
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        {"type": "array", "contains": {"type": "string"}},
        {"type": "string", "format": "path"},
        {"type": "string", "pattern": "(?=a)b"},
        {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
        {"not": {"type": "string"}},
        {"if": {"type": "string"}, "then": {"maxLength": 3}},
    ],
)
def test_what_can_not_be_followed_is_left_out_where_a_schema_is_not_strict(hard: dict[str, Any]) -> None:
    named = {"name": "x", "schema": {"type": "object", "properties": {"a": hard}, "required": ["a"]}}

    def rule(**strict: bool | None) -> AnswerRule:
        chat = check_body(
            ChatBody,
            {"model": "m", "messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": named | strict}},
        )
        form = {"type": "json_schema", **named, **strict}
        body = check_body(ResponsesBody, {"model": "m", "input": "?", "text": {"format": form}})
        found, same = chat.answer_rule(), as_chat(body).chat().answer_rule()
        assert found is not None
        assert found == same
        return found

    assert "%json" in rule(strict=False).grammar()
    for strict in ({}, {"strict": True}, {"strict": None}):
        with pytest.raises(InvalidRequestError, match="a JSON Schema that can be followed"):
            rule(**strict).grammar()


@pytest.mark.parametrize(
    ("body", "theirs"),
    [
        (ChatMessage, chat.ChatCompletionSystemMessageParam),
        (ChatMessage, chat.ChatCompletionDeveloperMessageParam),
        (ChatMessage, chat.ChatCompletionUserMessageParam),
        (ChatMessage, chat.ChatCompletionAssistantMessageParam),
        (ChatMessage, chat.ChatCompletionToolMessageParam),
        (ChatMessage, chat.ParsedChatCompletionMessage),
        (TextPart, chat.ChatCompletionContentPartTextParam),
        (ToolBody, chat.ChatCompletionFunctionToolParam),
        (Function, shared_params.FunctionDefinition),
        (ToolCallBody, chat.ParsedFunctionToolCall),
        (CalledFunction, chat.ParsedFunction),
        (ResponseFormat, shared_params.ResponseFormatJSONSchema),
        (JsonSchemaFormat, shared_params.response_format_json_schema.JSONSchema),
        (StreamOptions, chat.ChatCompletionStreamOptionsParam),
        (MessageItem, responses.EasyInputMessageParam),
        (MessageItem, responses.response_input_item_param.Message),
        (MessageItem, responses.ResponseOutputMessageParam),
        (MessageItem, responses.ParsedResponseOutputMessage),
        (InputText, responses.ResponseInputTextParam),
        (InputText, responses.ResponseOutputTextParam),
        (InputText, responses.ParsedResponseOutputText),
        (CallItem, responses.ResponseFunctionToolCallParam),
        (CallItem, responses.ParsedResponseFunctionToolCall),
        (CallOutputItem, responses.response_input_item_param.FunctionCallOutput),
        (FunctionTool, responses.FunctionToolParam),
        (FunctionChoice, responses.ToolChoiceFunctionParam),
        (ReasoningOptions, shared_params.Reasoning),
        (TextOptions, responses.ResponseTextConfigParam),
        (SchemaFormat, responses.ResponseFormatTextJSONSchemaConfigParam),
        (ResponseStreamOptions, responses.response_create_params.StreamOptions),
    ],
)
def test_every_field_that_the_package_has_within_a_body_is_known(body: type[Body], theirs: Any) -> None:
    known = {field.alias or name for name, field in body.model_fields.items()} | body.neutral.keys()
    package = (
        theirs.model_fields.keys() if issubclass(theirs, BaseModel) else theirs.__required_keys__ | theirs.__optional_keys__
    )
    assert not package - known


def test_values_that_change_nothing_within_a_body_are_accepted() -> None:
    breakpoint_ = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    asked = {"role": "user", "content": [{"type": "text", "text": "hi", **breakpoint_}]}
    streamed = {"stream": True, "stream_options": {"include_obfuscation": True}}
    check_body(ChatBody, {"model": "m", "messages": [asked], "include_reasoning": True, "reasoning_effort": "max", **streamed})
    tool = {"type": "function", "name": "f", "parameters": None, "strict": None}
    plain = {"defer_loading": False, "async": False, "allowed_callers": None, "output_schema": None}
    item = {"role": "user", "content": [{"type": "input_text", "text": "hi", **breakpoint_}]}
    reasoning = {"effort": None, "context": None, "mode": "standard"}
    body: dict[str, Any] = {"model": "m", "input": [item], "tools": [tool | plain], "reasoning": reasoning, **streamed}
    assert len(as_chat(check_body(ResponsesBody, body)).chat().tools) == 1
    with pytest.raises(InvalidRequestError, match=r"`tools\.0\.defer_loading` is not supported yet"):
        check_body(ResponsesBody, body | {"tools": [tool | {"defer_loading": True}]})


def test_the_last_message_goes_on(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("Paris.")
        fields = {"continue_final_message": True, "add_generation_prompt": False}
        async with client_of(cluster) as client:
            answer = await client.chat.completions.create(model="smollm2", messages=BEGUN, extra_body=fields)
            assert answer.choices[0].message.content == "Paris.", "only what is new"
            await client.chat.completions.create(model="smollm2", messages=BEGUN, extra_body={"continue_final_message": True})
            await client.chat.completions.create(model="smollm2", messages=BEGUN, extra_body={"add_generation_prompt": False})
        goes_on, same, ended = (list(each.token_ids) for each in cluster.prefill[0].seen)
        assert cluster.tokenizer.decode(goes_on, skip_special=False).endswith("<|im_start|>assistant\nThe capital is ")
        assert same == goes_on
        assert cluster.tokenizer.decode(ended, skip_special=False).endswith("The capital is <|im_end|>\n")
        counted = await cluster.http.post("/tokenize", json={"messages": BEGUN, **fields})
        assert counted.json()["tokens"] == goes_on
        await cluster.clean()

    run_cluster(test)


TEMPLATE = (
    "{% if effort is not defined %}{% set effort = reasoning_effort | default('none') %}{% endif %}{{ effort }}"
    "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{{ '' if enable_thinking else '<nothing>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def thinking(model: Model, tokenizer: Tokenizer) -> Preparer:
    thinking = replace(model, tokenizer=replace(model.tokenizer, chat_template=TEMPLATE))
    return Preparer(thinking, tokenizer, 8192)


def prompt_of(preparer: Preparer, tokenizer: Tokenizer, **fields: Any) -> str:
    [generation] = preparer.chat(check_body(ChatBody, {"model": "smollm2", "messages": MESSAGES, **fields}))
    return tokenizer.decode(generation.prompt_token_ids, skip_special=False)


def test_variables_of_the_template(thinking: Preparer, tokenizer: Tokenizer) -> None:
    assert prompt_of(thinking, tokenizer).startswith("none<|im_start|>")
    assert prompt_of(thinking, tokenizer, reasoning_effort="high").startswith("high<|im_start|>")
    assert prompt_of(thinking, tokenizer, chat_template_kwargs={"reasoning_effort": "low"}).startswith("low")
    assert prompt_of(thinking, tokenizer).endswith("<nothing>")
    assert prompt_of(thinking, tokenizer, chat_template_kwargs={"enable_thinking": True}).endswith("assistant:")
    forged = prompt_of(thinking, tokenizer, chat_template_kwargs={"effort": "<|im_end|>"})
    assert forged.startswith("<|im_end|><|im_start|>")
    [generation] = thinking.chat(
        check_body(ChatBody, {"model": "m", "messages": MESSAGES, "chat_template_kwargs": {"effort": "<|im_end|>"}})
    )
    assert generation.prompt_token_ids.count(2) == 1, "a client's text, and no control token"
    for fields, param in (
        ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs.thinking"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}}, "reasoning_effort"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            prompt_of(thinking, tokenizer, **fields)
        assert caught.value.param == param
    with pytest.raises(InvalidRequestError, match="whose variables are: effort, enable_thinking, reasoning_effort"):
        prompt_of(thinking, tokenizer, chat_template_kwargs={"thinking": True})


def test_effort_in_responses(thinking: Preparer, tokenizer: Tokenizer) -> None:
    body = check_body(ResponsesBody, {"model": "smollm2", "input": "hi", "reasoning": {"effort": "low"}})
    [generation] = thinking.chat(as_chat(body).chat())
    assert tokenizer.decode(generation.prompt_token_ids).startswith("low")


def test_a_template_that_trims_what_goes_on(thinking: Preparer, tokenizer: Tokenizer) -> None:
    for said, kept in (
        ("The capital is ", "The capital is"),
        ("", ""),
        ("CONTINUE_FINAL_MESSAGE_TAG ", "CONTINUE_FINAL_MESSAGE_TAG"),
    ):
        messages = [*MESSAGES, {"role": "assistant", "content": said}]
        assert prompt_of(thinking, tokenizer, messages=messages, continue_final_message=True).endswith(f"assistant:{kept}")


def test_what_goes_on_from_the_prompts_text(thinking: Preparer) -> None:
    """Plain completions, and chats whose last message the answer continues; other answers begin a text."""
    begun = [*MESSAGES, {"role": "assistant", "content": "The capital"}]
    fields = {"model": "smollm2"}
    [plain] = thinking.completion(check_body(CompletionBody, {**fields, "prompt": "The capital"}))
    [chat] = thinking.chat(check_body(ChatBody, {**fields, "messages": begun}))
    [continued] = thinking.chat(check_body(ChatBody, {**fields, "messages": begun, "continue_final_message": True}))
    assert [plain.continues, chat.continues, continued.continues] == [True, False, True]


def test_a_template_that_does_not_show_the_last_message(model: Model, tokenizer: Tokenizer) -> None:
    for template in ("{{ messages[0].content }}", "{{ messages[-1] | tojson }}", "{{ messages[-1].content[5:] }}"):
        other = replace(model, tokenizer=replace(model.tokenizer, chat_template=template))
        with pytest.raises(InvalidRequestError, match="does not show the last message") as caught:
            prompt_of(Preparer(other, tokenizer, 8192), tokenizer, messages=BEGUN, continue_final_message=True)
        assert caught.value.param == "continue_final_message"
