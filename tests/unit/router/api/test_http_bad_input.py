"""Bad input: each case is a 4xx in OpenAI's shape that names the field, and nothing reaches a worker."""

from __future__ import annotations

import asyncio
import codecs
import gzip
import json
from collections.abc import Callable
from typing import Any

import httpx

from configs.schema import HttpConfig

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}
SCHEMA = "response_format.json_schema.schema"


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


SAID = {"role": "assistant", "content": "x"}
BEGUN = {"messages": [*MESSAGES, SAID]}
DOUBLING = "start: A0\n" + "".join(f"A{index}: A{index + 1} A{index + 1}\n" for index in range(30)) + 'A30: "z"\n'

# path, fields that differ from a good request, status, param, part of the message
CASES: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    (PLAIN, {"model": "gpt-4"}, 404, "model", "this cluster serves 'smollm2'"),
    (PLAIN, {"model": ...}, 400, "model", "`model` is missing"),
    (PLAIN, {"model": 7}, 400, "model", "got 7"),
    (PLAIN, {"modle": "x", "tempreature": 1}, 400, "modle", "unknown fields `modle`, `tempreature`"),
    (CHAT, {"frequency": 1}, 400, "frequency", "unknown field `frequency`"),
    (PLAIN, {"structured_outputs": {"type": None}}, 400, "structured_outputs.type", "unknown field `structured_outputs.type`"),
    (PLAIN, {"prompt": ...}, 400, "prompt", "`prompt` is missing"),
    (PLAIN, {"prompt": ""}, 400, "prompt", "must be a non-empty string"),
    (PLAIN, {"prompt": []}, 400, "prompt", "must be a non-empty string"),
    (PLAIN, {"prompt": [""]}, 400, "prompt", "must be a non-empty string"),
    (PLAIN, {"prompt": [[]]}, 400, "prompt", "must be a non-empty string"),
    (PLAIN, {"prompt": ["a", ""]}, 400, "prompt", "must be a non-empty string"),
    (PLAIN, {"prompt": ["a"] * 1025}, 400, "prompt", "got a list of 1025"),
    (PLAIN, {"prompt": [[1]] * 9, "n": 128}, 400, "prompt", "got 9 with n 128"),
    (PLAIN, {"prompt": [[1], [1, 49152]]}, 400, "prompt", "from 0 to 49151; got 49152"),
    (PLAIN, {"prompt": 5}, 400, "prompt", "got 5"),
    (PLAIN, {"prompt": [1, "a"]}, 400, "prompt", "`prompt` must be"),
    (PLAIN, {"prompt": [1, 49152]}, 400, "prompt", "from 0 to 49151; got 49152"),
    (PLAIN, {"prompt": [-1]}, 400, "prompt", "got -1"),
    (PLAIN, {"prompt": [1.5]}, 400, "prompt", "`prompt` must be"),
    (CHAT, {"messages": ...}, 400, "messages", "`messages` is missing"),
    (CHAT, {"messages": []}, 400, "messages", "a non-empty list of messages"),
    (CHAT, {"messages": "hi"}, 400, "messages", "got 'hi'"),
    (CHAT, {"messages": [{"content": "hi"}]}, 400, "messages.0.role", "one of system, developer, user, assistant"),
    (CHAT, {"messages": [*MESSAGES, {"role": "robot", "content": "x"}]}, 400, "messages.1.role", "got 'robot'"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages.0.content", "is missing"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content", "got 5"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}]},
        400,
        "messages.0.content.1.type",
        "only kind of content that this model reads; got 'image_url'",
    ),
    (
        CHAT,
        {"messages": [*MESSAGES, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]},
        400,
        "messages.1.content.0.type",
        "only kind",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"text": "x", "typ": "text"}]}]},
        400,
        "messages.0.content.0.typ",
        "unknown",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "x", "mood": 1}]}, 400, "messages.0.mood", "unknown field"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        400,
        "messages.0.tool_calls.0.id",
        "is missing",
    ),
    (PLAIN, {"max_tokens": 0}, 400, "max_tokens", "at least 1 without `echo`; got 0"),
    (PLAIN, {"max_tokens": -5}, 400, "max_tokens", "got -5"),
    (PLAIN, {"max_tokens": "5"}, 400, "max_tokens", "got '5'"),
    (PLAIN, {"max_tokens": True}, 400, "max_tokens", "got true"),
    (PLAIN, {"max_tokens": 5.0}, 400, "max_tokens", "got 5.0"),
    (PLAIN, {"max_tokens": 10**30}, 400, "max_tokens", "got 1000"),
    (PLAIN, {"max_tokens": 9000}, 400, "prompt", "8192 tokens, but `prompt` has 1 and max_tokens is 9000: 9001 together"),
    (PLAIN, {"prompt": [1] * 8192}, 400, "prompt", "alone has 8192"),
    (CHAT, {"messages": [{"role": "user", "content": "a b " * 5000}]}, 400, "messages", "context is 8192 tokens"),
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, 400, "max_tokens", "give only one"),
    (PLAIN, {"temperature": -0.1}, 400, "temperature", "from 0 to 2; got -0.1"),
    (PLAIN, {"temperature": 2.1}, 400, "temperature", "from 0 to 2"),
    (PLAIN, {"temperature": "hot"}, 400, "temperature", "got 'hot'"),
    (PLAIN, {"temperature": True}, 400, "temperature", "got true"),
    (PLAIN, {"top_p": 0}, 400, "top_p", "over 0, up to 1; got 0"),
    (PLAIN, {"top_p": 1.5}, 400, "top_p", "got 1.5"),
    (PLAIN, {"top_k": -2}, 400, "top_k", "got -2"),
    (PLAIN, {"min_p": 2}, 400, "min_p", "from 0 to 1"),
    (PLAIN, {"seed": -1}, 400, "seed", "2**63 - 1; got -1"),
    (PLAIN, {"seed": 2**63}, 400, "seed", "from 0 to 2**63 - 1"),
    (PLAIN, {"min_tokens": 6, "max_tokens": 5}, 400, "min_tokens", "from 0 to max_tokens (5); got 6"),
    (PLAIN, {"stop": ""}, 400, "stop", "non-empty"),
    (PLAIN, {"stop": ["a"] * 17}, 400, "stop", "up to 16"),
    (PLAIN, {"stop": [1]}, 400, "stop", "non-empty string"),
    (PLAIN, {"stop_token_ids": [99999]}, 400, "stop_token_ids", "got 99999"),
    (PLAIN, {"stop_token_ids": 3}, 400, "stop_token_ids", "a list"),
    (PLAIN, {"logprobs": 21}, 400, "logprobs", "from 0 to 20"),
    (PLAIN, {"logprobs": True}, 400, "logprobs", "got true"),
    (CHAT, {"logprobs": 3}, 400, "logprobs", "true or false"),
    (CHAT, {"top_logprobs": 3}, 400, "top_logprobs", "needs `logprobs`"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "from 0 to 20"),
    (PLAIN, {"stream": 1}, 400, "stream", "true or false"),
    (PLAIN, {"stream_options": {"include_usage": True}}, 400, "stream_options", "set `stream`"),
    (PLAIN, {"stream": True, "stream_options": {"usage": 1}}, 400, "stream_options.usage", "unknown field"),
    (PLAIN, {"n": 0}, 400, "n", "from 1 to 128; got 0"),
    (CHAT, {"n": 129}, 400, "n", "from 1 to 128; got 129"),
    (PLAIN, {"n": True}, 400, "n", "got true"),
    (PLAIN, {"best_of": 2}, 400, "best_of", "not supported yet unless it equals `n` (1)"),
    (PLAIN, {"best_of": 2, "n": 3}, 400, "best_of", "not supported"),
    (PLAIN, {"echo": 1}, 400, "echo", "true or false"),
    (CHAT, {"echo": True}, 400, "echo", "not supported"),
    (CHAT, {"max_tokens": 0}, 400, "max_tokens", "an integer of at least 1; got 0"),
    (PLAIN, {"echo": True, "prompt": [1] * 8192, "max_tokens": 0}, 400, "prompt", "alone has 8192"),
    (PLAIN, {"echo": True, "prompt": [1] * 8000, "logprobs": 0, "n": 126}, 400, "logprobs", "1008000 tokens of all choices"),
    (PLAIN, {"echo": True, "prompt": [[1] * 6000] * 8, "logprobs": 20}, 400, "logprobs", "the 48000 tokens of all choices"),
    (PLAIN, {"suffix": "x"}, 400, "suffix", "not supported"),
    (PLAIN, {"presence_penalty": 2.1}, 400, "presence_penalty", "from -2 to 2; got 2.1"),
    (CHAT, {"frequency_penalty": "1"}, 400, "frequency_penalty", "from -2 to 2; got '1'"),
    (PLAIN, {"repetition_penalty": 0}, 400, "repetition_penalty", "from 0.01 to 100"),
    (CHAT, {"logit_bias": {"5": 101}}, 400, "logit_bias", "from -100 to 100"),
    (CHAT, {"logit_bias": {"5": True}}, 400, "logit_bias", "from -100 to 100"),
    (PLAIN, {"logit_bias": {"cat": 1}}, 400, "logit_bias", "token ids as keys; got 'cat'"),
    (PLAIN, {"logit_bias": {"-1": 1}}, 400, "logit_bias", "token ids as keys"),
    (PLAIN, {"logit_bias": {"49152": 1}}, 400, "logit_bias", "from 0 to 49151; got 49152"),
    (PLAIN, {"logit_bias": {str(i): 1 for i in range(1025)}}, 400, "logit_bias", "up to 1024"),
    (PLAIN, {"logit_bias": [1]}, 400, "logit_bias", "an object of"),
    (PLAIN, {"priority": 21}, 400, "priority", "an integer from -20 to 20"),
    (CHAT, {"priority": -1}, 400, "priority", "at least 0 without an API key"),
    (PLAIN, {"cache_salt": ""}, 400, "cache_salt", "a non-empty string"),
    (CHAT, {"cache_salt": "a" * 257}, 400, "cache_salt", "up to 256 characters"),
    (CHAT, {"cache_salt": 5}, 400, "cache_salt", "a non-empty string"),
    (CHAT, {"messages": [{"role": "tool", "content": "3"}]}, 400, "messages.0.tool_call_id", "is missing"),
    (CHAT, {"messages": [{"role": "tool", "content": "3", "tool_call_id": "a"}]}, 400, "messages.0.tool_call_id", "got 'a'"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, 400, "messages.0.tool_calls", "assistant"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]}, 400, "messages.0.tool_call_id", "role tool"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "[1]"}}]}]},
        400,
        "messages.0.tool_calls.0.function.arguments",
        "a JSON object, as a string",
    ),
    (CHAT, {"tools": [{}]}, 400, "tools.0.type", "is missing"),
    (CHAT, {"tools": [{"type": "retrieval"}]}, 400, "tools.0.type", "got 'retrieval'"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, 400, "tools.0.type", "\"function\"; got 'custom'"),
    (
        CHAT,
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}},
        400,
        "tool_choice.type",
        "got 'allowed_tools'",
    ),
    (CHAT, {"tools": [TOOL | {"function": {"name": "a b"}}]}, 400, "tools.0.function.name", "1 to 64 letters"),
    (CHAT, {"tools": [TOOL, TOOL]}, 400, "tools", "'f' is there twice"),
    (
        CHAT,
        {"tools": [TOOL, {"type": "function", "function": {"name": "g", "parameters": {"type": "thing"}}}]},
        400,
        "tools.1.function.parameters",
        "must be the JSON Schema of an object",
    ),
    (
        CHAT,
        {
            "tools": [
                TOOL,
                {"type": "function", "function": {"name": "g", "parameters": {"properties": {"a": {"type": "thing"}}}}},
            ]
        },
        400,
        "tools.1.function.parameters",
        "Invalid type: thing",
    ),
    (CHAT, {"tool_choice": "required"}, 400, "tool_choice", "needs `tools`"),
    (CHAT, {"tools": [TOOL], "tool_choice": "sometimes"}, 400, "tool_choice", "one of none, auto, required"),
    (
        CHAT,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        400,
        "tool_choice",
        "'g', which is none of the tools",
    ),
    (CHAT, {"response_format": {"type": "xml"}}, 400, "response_format.type", "got 'xml'"),
    (CHAT, {"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema", "is missing"),
    (PLAIN, {"response_format": schema_format({"type": "thing"})}, 400, SCHEMA, "Invalid type: thing"),
    (PLAIN, {"response_format": schema_format({"not": {}})}, 400, SCHEMA, "not"),
    (CHAT, {"response_format": schema_format({"$ref": "http://elsewhere/x"})}, 400, SCHEMA, "not present"),
    (CHAT, {"response_format": schema_format({"enum": ["x" * 300_000]})}, 400, SCHEMA, "must be smaller"),
    (CHAT, {"response_format": schema_format(5)}, 400, SCHEMA, "a JSON Schema; got 5"),
    (CHAT, {"response_format": {"type": "text", "json_schema": {"name": "a", "schema": {}}}}, 400, SCHEMA[:27], "only for"),
    (CHAT, {"metadata": {"a": 1}}, 400, "metadata", "up to 16 strings of up to 512 characters"),
    (CHAT, {"metadata": {str(index): "x" for index in range(17)}}, 400, "metadata", "up to 16 strings"),
    (CHAT, {"metadata": {"a" * 65: "x"}}, 400, "metadata", "keys of up to 64"),
    (CHAT, {"metadata": {"a": "x" * 513}}, 400, "metadata", "512 characters"),
    (CHAT, {"reasoning_effort": "high"}, 400, "reasoning_effort", "is not used by this model's chat template"),
    (CHAT, {"reasoning_effort": "much"}, 400, "reasoning_effort", "one of none, minimal"),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, 400, "chat_template_kwargs.enable_thinking", "is not used"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs.messages", "is not used"),
    (CHAT, {"chat_template_kwargs": 1}, 400, "chat_template_kwargs", "an object of up to 64"),
    (CHAT, {"continue_final_message": True}, 400, "continue_final_message", "a last message of the role assistant"),
    (
        CHAT,
        BEGUN | {"continue_final_message": True, "add_generation_prompt": True},
        400,
        "continue_final_message",
        "both be true",
    ),
    (
        "/tokenize",
        BEGUN | {"continue_final_message": True, "add_generation_prompt": True},
        400,
        "continue_final_message",
        "both",
    ),
    (CHAT, {"guided_json": "{"}, 400, "guided_json", "it is not valid JSON"),
    (CHAT, {"guided_json": "[]"}, 400, "guided_json", "it holds no object"),
    (PLAIN, {"guided_json": {"type": "thing"}}, 400, "guided_json", "a JSON Schema that can be followed: Invalid type: thing"),
    (PLAIN, {"guided_regex": "(?=a)"}, 400, "guided_regex", "look-around"),
    (PLAIN, {"guided_regex": "a\\"}, 400, "guided_regex", "a regular expression that can be followed"),
    (PLAIN, {"guided_choice": []}, 400, "guided_choice", "non-empty strings; got a list of 0"),
    (PLAIN, {"guided_choice": [""]}, 400, "guided_choice", "non-empty strings"),
    (PLAIN, {"guided_grammar": 'root ::= "a"'}, 400, "guided_grammar", "in the notation of Lark"),
    (
        PLAIN,
        {"guided_grammar": '%llguidance {"no_forcing": false}\nstart: "a"'},
        400,
        "guided_grammar",
        "must not set no_forcing",
    ),
    (PLAIN, {"guided_grammar": 'start[temperature=2]: "a"'}, 400, "guided_grammar", "a rule's temperature"),
    (CHAT, {"guided_grammar": "start: <[99999999]>"}, 400, "guided_grammar", "from 0 to 49151; got 99999999"),
    (PLAIN, {"guided_grammar": DOUBLING}, 400, "guided_grammar", "too big"),
    (PLAIN, {"guided_json": {}, "guided_regex": "a"}, 400, "guided_regex", "`guided_json` and `guided_regex` both say"),
    (CHAT, {"guided_json": {}, "response_format": {"type": "json_object"}}, 400, "guided_json", "`response_format` and"),
    (CHAT, {"guided_regex": "a", "structured_outputs": {"regex": "a"}}, 400, "guided_regex", "both say what form"),
    (CHAT, {"guided_grammar": 'start: "a"', "tools": [TOOL]}, 400, "guided_grammar", "together with `tools`"),
    (CHAT, {"structured_outputs": {}}, 400, "structured_outputs", "exactly one of json, regex"),
    (CHAT, {"structured_outputs": {"regex": "a", "choice": ["a"]}}, 400, "structured_outputs", "got 2"),
    (CHAT, {"structured_outputs": {"regex": "["}}, 400, "structured_outputs.regex", "unclosed character class"),
    (CHAT, {"structured_outputs": {"structural_tag": "x"}}, 400, "structured_outputs.structural_tag", "not supported"),
    (CHAT, {"guided_decoding_backend": "outlines"}, 400, "guided_decoding_backend", "not supported"),
    (CHAT, {"guided_whitespace_pattern": " *"}, 400, "guided_whitespace_pattern", "not supported"),
    ("/tokenize", {}, 400, "prompt", "either `prompt` or `messages`"),
    ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt", "either"),
    ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, 400, "add_special_tokens", "is for `prompt`"),
    ("/tokenize", {"prompt": "a", "tools": [TOOL]}, 400, "tools", "is for `messages`"),
    ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"x": 1}}, 400, "chat_template_kwargs", "is for `messages`"),
    ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400, "add_generation_prompt", "is for `messages`"),
    ("/detokenize", {"tokens": [50000]}, 400, "tokens", "from 0 to 49151"),
    ("/detokenize", {"tokens": "x"}, 400, "tokens", "a list of token ids"),
    ("/admin/scale", {}, 400, "prefill", "say how many"),
    ("/admin/rollout", {"action": "start"}, 400, "config", "`config` is missing"),
    ("/admin/rollout", {"action": "start", "config": {}, "canary": 0.6}, 400, "canary", "up to 0.5; got 0.6"),
    ("/admin/rollout", {"action": "start", "config": [1]}, 400, "config", "got a list of 1"),
    ("/admin/scale", {"prefill": -1}, 400, "prefill", "from 0 to 1024; got -1"),
    ("/admin/scale", {"decode": "3"}, 400, "decode", "got '3'"),
    ("/admin/scale", {"decode": 5000}, 400, "decode", "got 5000"),
    ("/admin/scale", {"gpu": 1}, 400, "gpu", "unknown field"),
    ("/admin/scale", {"routers": 0}, 400, "routers", "from 1 to 64; got 0"),
    ("/admin/scale", {"decode": 2, "routers": 65}, 400, "routers", "from 1 to 64; got 65"),
]

NEUTRAL: list[tuple[str, dict[str, Any]]] = [
    (PLAIN, {"n": 1, "best_of": 1, "echo": False, "suffix": None, "presence_penalty": 0, "frequency_penalty": 0.0}),
    (PLAIN, {"logit_bias": {}, "repetition_penalty": 1.0, "priority": 0, "user": "me", "cache_salt": None, "top_k": -1}),
    (PLAIN, {"max_tokens": None, "temperature": None, "stop": None, "logprobs": None, "seed": None, "stream_options": None}),
    (CHAT, {"tools": None, "tool_choice": "auto", "response_format": {"type": "text"}, "parallel_tool_calls": True, "n": 1}),
    (PLAIN, {"n": 2, "best_of": 2}),
    (CHAT, {"metadata": {"a" * 64: "x" * 512}, "chat_template_kwargs": {}, "reasoning_effort": None}),
    (CHAT, {"guided_json": {"type": "object"}, "response_format": {"type": "text"}, "guided_decoding_backend": "auto"}),
    (CHAT, {"messages": [{"role": "assistant", "content": "x", "refusal": None, "tool_calls": None}, *MESSAGES]}),
    (CHAT, {"messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": ""}], "temperature": 0, "top_p": 1}),
    (CHAT, {"messages": [{"role": "user", "content": "x", "type": "text"}]}),  # lm-evaluation-harness
    (CHAT, {"messages": [SAID | {"type": "message", "provider_specific_fields": None}, *MESSAGES]}),  # LiteLLM
    (CHAT, {"messages": [SAID | {"provider_specific_fields": {"refusal": None}}, *MESSAGES]}),
]


def body_for(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    good: dict[str, Any] = {"model": "smollm2"}
    if path == PLAIN:
        good |= {"prompt": [1]}
    elif path == CHAT:
        good |= {"messages": MESSAGES, "max_tokens": 3}
    elif path in ("/admin/scale", "/admin/rollout"):
        good = {}
    if path in (PLAIN,) and "max_tokens" not in fields:
        good |= {"max_tokens": 3}
    if "max_completion_tokens" not in fields and path == CHAT and "messages" in fields:
        good.pop("max_tokens", None)
    return {name: value for name, value in (good | fields).items() if value is not ...}


def test_every_bad_field_is_named(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        for path, fields, status, param, text in CASES:
            response = await cluster.http.post(path, json=body_for(path, fields))
            case = f"{path} {str(fields)[:80]}: {response.status_code} {response.text[:300]}"
            assert response.status_code == status, case
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, case
            assert error["param"] == param, case
            assert text in error["message"], case
            assert error["type"] == "invalid_request_error", case
        assert not cluster.prefill[0].seen
        assert not cluster.controller.scaled
        await cluster.clean()

    run_cluster(test)


def test_neutral_values_are_accepted(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("fine")
        for path, fields in NEUTRAL:
            response = await cluster.http.post(path, json=body_for(path, fields))
            assert response.status_code == 200, (fields, response.text)

    run_cluster(test)


def test_context_length_has_its_own_code(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        response = await cluster.http.post(PLAIN, json=body_for(PLAIN, {"max_tokens": 8192}))
        assert response.json()["error"]["code"] == "context_length_exceeded"
        longest = await cluster.http.post(PLAIN, json=body_for(PLAIN, {"prompt": [1] * 8189, "max_tokens": 3}))
        assert longest.status_code == 200

    run_cluster(test)


def test_bodies_that_are_no_json_objects(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        for raw in (
            b"",
            b"{",
            b"[1]",
            b"null",
            b"\xff\xfe",
            b'{"model": NaN}',
            b'{"prompt": "\\ud800"}',
            b"[" * 5000,
            b'{"a":1}x',
        ):
            response = await cluster.http.post(PLAIN, content=raw, headers={"content-type": "application/json"})
            assert response.status_code == 400, raw[:20]
            assert "JSON" in response.json()["error"]["message"]
        inf = b'{"model": "smollm2", "prompt": "a", "temperature": 1e999}'
        response = await cluster.http.post(PLAIN, content=inf, headers={"content-type": "application/json"})
        assert response.json()["error"]["param"] == "temperature"
        for infinite in (b"1e999", b"-1" + b"0" * 250 + b"e99", b"[[2e+0999]]"):
            tool = b'{"type": "function", "name": "f", "parameters": {"const": %s}}' % infinite
            inf = b'{"model": "smollm2", "input": "a", "tool_choice": "none", "tools": [%s]}' % tool
            response = await cluster.http.post("/v1/responses", content=inf, headers={"content-type": "application/json"})
            assert response.status_code == 400, infinite
            assert "larger than JSON's readers can hold" in response.json()["error"]["message"]
        for media_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            response = await cluster.http.post(PLAIN, content=b"{}", headers={"content-type": media_type})
            assert response.status_code == 415
            assert media_type in response.json()["error"]["message"]
        good = json.dumps({"model": "smollm2", "prompt": "a", "max_tokens": 1}).encode()
        headers = {"content-type": "Application/JSON; charset=utf-8"}
        for body in (good, codecs.BOM_UTF8 + good):
            response = await cluster.http.post(PLAIN, content=body, headers=headers | {"content-encoding": "identity"})
            assert response.status_code == 200
        response = await cluster.http.post(PLAIN, content=gzip.compress(good), headers=headers | {"content-encoding": "gzip"})
        assert response.status_code == 415
        assert response.json()["error"]["message"] == "the body must be sent without a content-encoding; got gzip"

    run_cluster(test)


def test_too_large_and_too_slow_bodies(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        headers = {"content-type": "application/json"}
        big = json.dumps(body_for(PLAIN, {"prompt": "a" * 2000})).encode()
        response = await cluster.http.post(PLAIN, content=big, headers=headers)
        assert response.status_code == 413
        assert "1000 bytes" in response.json()["error"]["message"]

        async def pieces(pause_s: float) -> Any:
            for start in range(0, len(big), 500):
                yield big[start : start + 500]
                await asyncio.sleep(pause_s)

        response = await cluster.http.post(PLAIN, content=pieces(0), headers=headers)
        assert response.status_code == 413, "also without a content-length"
        async with httpx.AsyncClient(base_url=cluster.url) as slow:
            response = await slow.post(PLAIN, content=pieces(0.2), headers=headers)
        assert response.status_code == 408

    http = HttpConfig(max_body_bytes=1000).model_dump()
    run_cluster(test, http=http, limits={"body_s": 0.3, "heartbeat_s": 0.05})


def test_unknown_paths_and_wrong_methods(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        unknown = await cluster.http.get("/v2/nothing")
        assert unknown.status_code == 404
        assert unknown.json()["error"]["message"] == "there is no /v2/nothing"
        wrong = await cluster.http.get(CHAT)
        assert wrong.status_code == 405
        assert wrong.json()["error"]["code"] == "method_not_allowed"
        assert wrong.headers["allow"] == "POST"
        assert (await cluster.http.get("/v1/models/nobody")).status_code == 404
        assert (await cluster.http.get("/docs")).status_code == 404, "no page that loads scripts from elsewhere"

    run_cluster(test)
