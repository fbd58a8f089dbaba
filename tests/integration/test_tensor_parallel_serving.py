"""Gangs of ranks through the whole cluster: the tokens of a single rank, whatever the sizes, also after a rank was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import Qwen3ForCausalLM

from configs.facts import Architecture
from tests.tiny_models import BYTE_END, BYTE_TOKENS, random_model, save_byte_tokenizer, saved, tiny_facts

PROMPTS = [[5, 9, 2, 77], list(range(3, 90)), [200, 31] * 40, [17]]
"""Token ids that both models have."""
ANSWER = 12

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # gangs of processes share two cores here


def greedy(url: str, model: str, prompt: list[int]) -> list[int]:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": ANSWER,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body | {"return_token_ids": True}, timeout=120)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


@pytest.fixture(scope="module")
def small_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Qwen3 with 4 heads and 2 KV heads, as `save_pretrained` would leave it."""
    folder = tmp_path_factory.mktemp("qwen3") / "small-qwen3"
    facts = tiny_facts(
        "small-qwen3",
        architecture=Architecture.QWEN3,
        intermediate_size=128,
        vocab_size=BYTE_TOKENS,
        tie_word_embeddings=False,
        eos_token_ids=(BYTE_END,),
        qk_norm=True,
    )
    saved(random_model(facts, seed=11), facts, folder)
    save_byte_tokenizer(folder)
    return folder


def by_transformers(model: Any) -> list[list[int]]:
    """The answers of a model in float32: there another order of sums turns no token of these."""
    answers = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(ANSWER):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    return answers


@pytest.mark.parametrize(("prefill", "decode"), [(2, 4), (4, 1)])
def test_a_small_model_shared_out_says_the_same(
    serve: Callable[..., Any], small_qwen3: Path, prefill: int, decode: int
) -> None:
    expected = by_transformers(Qwen3ForCausalLM.from_pretrained(small_qwen3).float().eval())
    served = serve(
        *("--model", str(small_qwen3), "--dtype", "float32", "--disaggregation", "always"),
        *("--prefill-tensor-parallel-size", str(prefill), "--decode-tensor-parallel-size", str(decode)),
    )
    served.wait_ready()
    assert [len(served.worker(name)["rank_pids"]) for name in ("worker-0", "worker-1")] == [prefill, decode]
    assert [greedy(served.url, "small-qwen3", prompt) for prompt in PROMPTS] == expected
    served.until(served.clean, 20)
    assert served.leaks() == []
    served.end()


def test_ranks_read_what_they_left_on_the_disk(serve: Callable[..., Any], small_qwen3: Path, tmp_path: Path) -> None:
    """Each its own heads, in another life of the cluster: the first answer of the second life is that of the first one."""
    answers = []
    for _ in range(2):
        served = serve(
            *("--model", str(small_qwen3), "--dtype", "float32", "--tensor-parallel-size", "2"),
            *("--kv-offloading-dir", str(tmp_path / "kv"), "--kv-offloading-disk-size", "0.1"),
        )
        served.wait_ready()
        body = {"model": "small-qwen3", "prompt": PROMPTS[1], "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{served.url}/v1/completions", json=body | {"return_token_ids": True}, timeout=120).json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        answers.append((answer["choices"][0]["token_ids"], cached))
        served.until(lambda served=served: served.worker("worker-0")["tiers"]["disk"]["tokens"] >= 80, 20)
        served.until(served.clean, 20)
        assert served.leaks() == []
        served.end()
    (tokens, cached), (again, held) = answers
    assert (again, cached, held) == (tokens, 0, 80)


@pytest.mark.long
def test_the_default_model_on_three_ranks_and_a_killed_one(transformers_smollm2: Any, serve: Callable[..., Any]) -> None:
    alone = by_transformers(transformers_smollm2)
    served = serve("--dtype", "float32", "--disaggregation", "always", "--decode-tensor-parallel-size", "3")
    served.wait_ready()
    assert [greedy(served.url, "smollm2", prompt) for prompt in PROMPTS] == alone
    for rank in (2, 0):
        kill_rank(served, rank)
        assert [greedy(served.url, "smollm2", prompt) for prompt in PROMPTS] == alone
        served.until(served.clean, 20)
        assert served.leaks() == []
    served.end()


def kill_rank(served: Any, rank: int) -> None:
    """Until the gang's next life is ready, and nothing is left of the former one."""
    former = served.worker("worker-1")
    os.kill(former["rank_pids"][rank], signal.SIGKILL)
    served.until(lambda: is_after(served.worker("worker-1"), former), 120)
    served.until(lambda: not any(pid in served.processes() for pid in former["rank_pids"]), 60)


def is_after(worker: dict[str, Any], former: dict[str, Any]) -> bool:
    """It is ready in its next life, and linked."""
    return worker["epoch"] == former["epoch"] + 1 and worker["state"] == "ready" and worker["running"] is not None


def test_a_rank_that_is_killed_in_a_stream_costs_a_pause(serve: Callable[..., Any]) -> None:
    """The stream goes on with the gang's next life, or at another worker."""
    served = serve("--decode-tensor-parallel-size", "3", "--decode", "2")
    served.wait_ready()
    body = {"model": "smollm2", "prompt": PROMPTS[1], "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True}
    whole = httpx.post(f"{served.url}/v1/completions", json=body, timeout=120).json()["choices"][0]["token_ids"]
    tokens: list[int] = []
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body | {"stream": True}, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                tokens += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
                if len(tokens) == 10:
                    [busy] = [worker for worker in served.workers() if worker["role"] == "decode" and worker["running"]]
                    os.kill(busy["rank_pids"][1], signal.SIGKILL)
    assert tokens == whole
    served.until(lambda: served.settled(1, 2) and served.clean(), 120)
    assert served.leaks() == []
    served.end()


def test_sizes_that_do_not_divide_are_refused_with_those_that_would(tandem: str) -> None:
    ended = subprocess.run(
        [tandem, "serve", "--decode-tensor-parallel-size", "2"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "decode.tensor_parallel_size" in ended.stderr
    assert "allow 1, 3" in ended.stderr
