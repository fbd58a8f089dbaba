"""A draft model over HTTP: bfloat16 weights, drafted by the four bits that the same file stores. Every answer stays the same.

With `--quantization none` the default model's weights are expanded when they are loaded; the draft model uses them as they are
stored, and is faster. How many drafts are made depends on what this machine measures, but some are.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_speculation import (
    PROMPTS,
    Request,
    all_at_once,
    ask,
    complete,
    counted,
    plain,
    requests_of_every_kind,
)

pytestmark = [pytest.mark.slow, pytest.mark.long]

CONFIG = json.dumps({"method": "draft_model", "model": "smollm2", "num_speculative_tokens": 4})


@pytest.fixture(scope="module")
def drafted(serve: Callable[..., Any]) -> Any:
    served = serve("--quantization", "none", "--speculative-config", CONFIG, "--decode", "2")
    served.wait_ready()
    return served


def longer(requests: list[Request]) -> list[Request]:
    """Answers that last, so that their workers can be killed meanwhile."""
    return [(path, body | {"max_tokens": 300, "ignore_eos": True}) for path, body in requests]


def test_every_answer_is_the_same(drafted: Any) -> None:
    """One after the other, and all at once."""
    requests = requests_of_every_kind()
    expected = all_at_once(drafted.url, [plain(request) for request in requests])
    assert counted(drafted, "tandem:spec_decode_num_draft_tokens_total") == 0
    for answers in ([ask(drafted.url, request) for request in requests], all_at_once(drafted.url, requests)):
        for request, answer, alone in zip(requests, answers, expected, strict=True):
            assert answer == alone, request
    drafted.until(lambda: counted(drafted, "tandem:spec_decode_num_accepted_tokens_total") > 50, 20)


def test_a_kill_and_a_drain_change_nothing(drafted: Any) -> None:
    requests = longer([complete(prompt, temperature=n % 2 / 2) for n, prompt in enumerate(PROMPTS)])
    expected = all_at_once(drafted.url, [plain(request) for request in requests])
    resumed = counted(drafted, "tandem:resumed_streams_total")

    def decodes() -> list[dict[str, Any]]:
        return [worker for worker in drafted.workers() if worker["role"] == "decode"]

    busy: list[dict[str, Any]] = []

    def both_busy() -> bool:
        busy[:] = [each for each in decodes() if (each["running"] or 0) > 2]
        return len(busy) == 2

    with ThreadPoolExecutor(len(requests)) as threads:
        answers = [threads.submit(ask, drafted.url, request) for request in requests]
        drafted.until(both_busy, 60)
        victim, other = busy
        os.kill(victim["pid"], signal.SIGKILL)
        drafted.until(lambda: counted(drafted, "tandem:resumed_streams_total") > resumed, 60)
        drafted.until(lambda: drafted.settled(1, 2), 120)
        drained = drafted.ask("POST", "/admin/drain", json={"worker": other["worker_id"], "restart": True})
        assert drained.status_code == 200, drained.text
        found = [answer.result(300) for answer in answers]
    for request, answer, alone in zip(requests, found, expected, strict=True):
        assert answer["choices"] == alone["choices"], request
    drafted.until(lambda: drafted.settled(1, 2), 120)
    drafted.until(drafted.clean, 20)


def test_other_draft_models_are_refused_at_the_start(launch: Callable[..., Any], tmp_path: Path) -> None:
    missing = tmp_path / "none.gguf"
    config = {"method": "draft_model", "model": str(missing), "num_speculative_tokens": 4}
    served = launch("--speculative-config", json.dumps(config))
    served.process.wait(60)
    assert served.process.returncode == 2
    assert f"speculative_config.model: {missing}: no such file" in " ".join(served.said().split())
    assert "Traceback" not in served.said()
