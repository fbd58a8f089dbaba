"""`include_times`: where the time of a request went, in its usage."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

STAGES = {"prepare", "queue", "prefill_queue", "prefill", "handoff_wait", "transfer", "decode_queue", "decode_step", "send"}


def check(times: dict[str, Any], num_tokens: int) -> None:
    assert set(times) == {"stages", "total", "ttft", "token_gaps", "resumes", "placed_by"}
    assert STAGES <= set(times["stages"]) <= STAGES | {"decode_gap"}
    assert sum(times["stages"].values()) == pytest.approx(times["total"], rel=0.01, abs=1e-4)
    assert len(times["token_gaps"]) == num_tokens - 1
    assert 0 < times["ttft"] < times["total"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streamed_and_whole_answers_tell(run_cluster: Callable[..., None], path: str) -> None:
    async def test(cluster: Any) -> None:
        cluster.script.step_s = 0.02
        prompt: dict[str, Any] = (
            {"prompt": "Count:"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
        )
        body = {"model": "smollm2", "max_tokens": 20, "ignore_eos": True, "include_times": True, **prompt}
        began = time.monotonic()
        whole = (await cluster.http.post(path, json=body)).json()
        took = time.monotonic() - began
        [times] = whole["usage"]["times"]
        check(times, 20)
        decode_s = sum(times["stages"].get(stage, 0.0) for stage in ("decode_queue", "decode_step", "decode_gap"))
        assert decode_s > 19 * 0.02
        assert times["total"] <= took
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        lines = (await cluster.http.post(path, json=streamed)).text.split("\n\n")
        usage = json.loads(lines[-3].removeprefix("data: "))["usage"]
        check(usage["times"][0], 20)

    run_cluster(test)


def test_every_choice_has_its_own(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        usage = (await cluster.complete(n=3, max_tokens=5, ignore_eos=True, include_times=True)).json()["usage"]
        assert len(usage["times"]) == 3
        for times in usage["times"]:
            check(times, 5)

    run_cluster(test)


def test_nobody_is_told_unasked(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        assert "times" not in (await cluster.complete()).json()["usage"]

    run_cluster(test)


@pytest.mark.parametrize("name", ["include_times", "include_predictions"])
@pytest.mark.parametrize("fields", [{"": 1}, {"": "yes"}, {"": True, "stream": True}])
def test_wrong_wishes_are_refused_by_name(run_cluster: Callable[..., None], name: str, fields: dict[str, Any]) -> None:
    async def test(cluster: Any) -> None:
        answer = await cluster.complete(**{key or name: value for key, value in fields.items()})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)

    run_cluster(test)


def test_the_log_line_has_the_stages(run_cluster: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def test(cluster: Any) -> None:
        await cluster.complete(max_tokens=5)
        [fields] = [record.fields for record in caplog.records if record.getMessage() == "request"]  # type: ignore[attr-defined]
        assert {f"{stage}_s" for stage in STAGES} <= set(fields)
        stages = {f"{stage}_s" for stage in STAGES | {"decode_gap"}}
        assert sum(value for name, value in fields.items() if name in stages) == pytest.approx(fields["total_s"], rel=0.01)

    run_cluster(test)
