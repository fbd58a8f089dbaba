"""A prompt of 128k tokens over HTTP: right, no hindrance for others, and gone as soon as its client is.

The model is small and random, and its tokenizer has a token for each byte. So the texts are as long as their prompts.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from configs.facts import YarnScaling
from tests.tiny_models import BYTE_END, BYTE_TOKENS, random_model, save_byte_tokenizer, saved, tiny_facts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CONTEXT = 131_072
ANSWER = 4
SECONDS = 900


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with YaRN, as `save_pretrained` would leave it."""
    folder = tmp_path_factory.mktemp("long") / "long"
    facts = tiny_facts(
        "long",
        **{"hidden_size": 64, "intermediate_size": 64, "num_heads": 1, "num_kv_heads": 1, "head_dim": 64},
        vocab_size=BYTE_TOKENS,
        eos_token_ids=(BYTE_END,),
        max_model_len=CONTEXT,
        rope_scaling=YarnScaling(32.0, 4096, 1.3),
    )
    saved(random_model(facts, seed=5), facts, folder)
    save_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def served(serve: Callable[..., Any], folder: Path) -> Any:
    config = folder.with_name("config.yaml")
    pool = f"{{kv_cache_tokens: {CONTEXT + 16_384}}}"
    config.write_text(f"prefill: {pool}\ndecode: {pool}\n")
    served = serve("--config", str(config), "--model", str(folder), "--dtype", "float32", "--disaggregation", "always")
    served.wait_ready()
    return served


def text_of(num_tokens: int, seed: int) -> str:
    rng = random.Random(seed)
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ,.\n", k=num_tokens))


def greedy(prompt: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    body = {"model": "long", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return body | {"return_token_ids": True, "cache_salt": os.urandom(8).hex(), **fields}


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@contextmanager
def streaming(url: str) -> Iterator[list[float]]:
    """Another client that reads a stream, and the next one when it ends: when its events came."""
    came, over = list[float](), threading.Event()

    def read() -> None:
        while not over.is_set():
            body = greedy("Once", 3000, stream=True)
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=SECONDS) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        came.append(time.monotonic())
                    if over.is_set():
                        return

    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(read)
        try:
            yield came
        finally:
            over.set()
            reading.result(60)


def assert_is_the_reference_s(folder: Path, prompt: str, choice: dict[str, Any]) -> None:
    model = LlamaForCausalLM.from_pretrained(folder).float().eval()
    tokenizer, answer = Tokenizer.from_file(str(folder / "tokenizer.json")), choice["token_ids"]
    tokens = torch.tensor([[*tokenizer.encode(prompt).ids, *answer[:-1]]])
    assert tokens.shape[1] == CONTEXT - 1
    with torch.inference_mode():
        logits = model(tokens, logits_to_keep=ANSWER, use_cache=False).logits[0]
    assert logits.argmax(-1).tolist() == answer
    expected = logits.log_softmax(-1).max(-1).values
    torch.testing.assert_close(torch.tensor(choice["logprobs"]["token_logprobs"]), expected, atol=1e-3, rtol=0)


@pytest.mark.long
def test_a_long_prompt_is_right_while_others_stream_and_ask(served: Any, folder: Path) -> None:
    prompt, salt = text_of(CONTEXT - ANSWER, 1), os.urandom(8).hex()
    asked = greedy(prompt, ANSWER, cache_salt=salt, logprobs=0)
    waits = list[float]()
    with streaming(served.url) as came, ThreadPoolExecutor(1) as threads:
        served.until(lambda: len(came) > 10, 60)
        began = time.monotonic()
        long = threads.submit(ask, served.url, asked)
        while not long.done():
            begun = time.monotonic()
            ask(served.url, greedy(text_of(200, len(waits) + 2), 2))
            waits.append(time.monotonic() - begun)
        took = time.monotonic() - began
        gaps = [later - earlier for earlier, later in pairwise(came) if earlier >= began]
    [choice] = long.result()["choices"]
    assert len(waits) > 10
    assert max(waits) < took / 4, "a short prompt waits for chunks, not for the prompt"
    assert max(gaps) < took / 4, "neither tokenizing nor handing over holds up another client's stream"
    assert_is_the_reference_s(folder, prompt, choice)
    token_ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(prompt).ids
    again = ask(served.url, asked | {"prompt": token_ids})
    assert again["choices"][0]["token_ids"] == choice["token_ids"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > CONTEXT / 2, "other prompts took the place of some of it"
    served.until(served.clean, 20)


def prompt_tokens(served: Any) -> tuple[float, float]:
    """Those that wait at workers, and those that were computed, by the workers' latest reports."""
    lines = served.ask("GET", "/metrics").text.splitlines()
    names = "tandem:queued_prompt_tokens{", "tandem:prefilled_tokens_total{"
    waiting, computed = (sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)) for name in names)
    return waiting, computed


def test_a_long_prompt_whose_client_leaves_is_computed_no_further(served: Any) -> None:
    served.until(lambda: prompt_tokens(served)[0] == 0, 20)
    _, before = prompt_tokens(served)
    body = greedy(text_of(CONTEXT - ANSWER, 2), ANSWER, stream=True)
    client = HTTPConnection("127.0.0.1", served.port)
    client.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    served.until(lambda: 0 < prompt_tokens(served)[0] < CONTEXT - 5000, 120)
    client.close()
    served.until(served.clean, 20)
    served.until(lambda: prompt_tokens(served)[0] == 0, 20)
    assert 4000 < prompt_tokens(served)[1] - before < CONTEXT / 2
