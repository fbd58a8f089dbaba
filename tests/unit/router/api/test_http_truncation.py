"""`truncation: "auto"` over HTTP: chats and responses that are too long lose their oldest turns, and say how many."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.commands.lib.key_file import add_key
from configs.schema import HttpConfig

Run = Callable[..., None]

WORDS = "word " * 1000
CHAT: dict[str, Any] = {
    "model": "smollm2",
    "truncation": "auto",
    "messages": [
        {"role": "system", "content": "Be brief."},
        *({"role": role, "content": f"{n} {WORDS}"} for n in range(5) for role in ("user", "assistant")),
        {"role": "user", "content": "And now?"},
    ],
}
DROPPED = "x-tandem-dropped-messages"


def said(cluster: Any) -> str:
    text: str = cluster.tokenizer.decode(cluster.prefill[0].seen[-1].token_ids, skip_special=False)
    return text


def test_the_oldest_turns_go_until_an_answer_fits(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("Yes.")
        refused = await cluster.http.post("/v1/chat/completions", json=CHAT | {"truncation": "disabled"})
        assert refused.status_code == 400
        # 10,000 words in five turns of 2,000; 8,192 tokens are prompt and answer.
        for fields, dropped in (
            ({}, 4),
            ({"max_tokens": 1}, 2),
            ({"max_tokens": 3000}, 6),
            ({"max_completion_tokens": 8000}, 10),
        ):
            for stream in (False, True):
                answer = await cluster.http.post("/v1/chat/completions", json=CHAT | fields | {"stream": stream})
                assert (answer.status_code, answer.headers[DROPPED]) == (200, str(dropped))
            text = said(cluster)
            assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
            assert text.endswith("<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n")
            assert text.count(WORDS.strip()) == 10 - dropped
        assert cluster.prefill[0].seen[0].sampling.max_tokens >= 1024

    run_cluster(test)


def test_what_fits_is_left_alone_and_what_never_fits_is_the_error_that_it_was(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("Yes.")
        short = CHAT | {"messages": CHAT["messages"][-1:]}
        answer = await cluster.http.post("/v1/chat/completions", json=short)
        assert answer.headers[DROPPED] == "0"
        plain = await cluster.http.post("/v1/chat/completions", json=short | {"truncation": "disabled"})
        assert DROPPED not in plain.headers
        long = CHAT | {"messages": [*CHAT["messages"][:3], {"role": "user", "content": WORDS * 9}]}
        errors = [
            (await cluster.http.post("/v1/chat/completions", json=long | {"truncation": truncation})).json()["error"]
            for truncation in ("auto", "disabled")
        ]
        assert errors[0] == errors[1]
        assert errors[0]["code"] == "context_length_exceeded"
        tight = CHAT | {"messages": [{"role": "user", "content": WORDS * 8}]}
        answer = await cluster.http.post("/v1/chat/completions", json=tight)
        assert (answer.status_code, answer.headers[DROPPED]) == (200, "0"), "little room is better than none"

    run_cluster(test)


def test_responses_too(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("Yes.")
        body = {"model": "smollm2", "truncation": "auto", "instructions": "Short.", "input": CHAT["messages"][1:]}
        answer = await cluster.http.post("/v1/responses", json=body)
        assert (answer.status_code, answer.headers[DROPPED]) == (200, "4")
        assert answer.json()["truncation"] == "auto"
        assert said(cluster).startswith("<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\n2 word")

    run_cluster(test)


def test_a_keys_context_counts(run_cluster: Run, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = add_key(path, {"tenant": "a", "max_context": 4096})

    async def test(cluster: Any) -> None:
        cluster.says("Yes.")
        answer = await cluster.http.post("/v1/chat/completions", json=CHAT, headers={"authorization": f"Bearer {key}"})
        assert (answer.status_code, answer.headers[DROPPED]) == (200, "8")

    run_cluster(test, http=HttpConfig(keys_file=str(path)).model_dump())
