"""How the answer to `/tokenize` is written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from router.api.large.encoding import encoded

Run = Callable[..., None]


def test_many_ids_are_written_in_the_thread_that_found_them(run_cluster: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million ids would hold up the loop for 0.14 s. Slice by slice, they hold up no other thread either."""
    written: list[tuple[str, bool]] = []

    def noted(value: Any, *, large: bool) -> bytes:
        written.append((threading.current_thread().name, large))
        return encoded(value, large=large)

    monkeypatch.setattr("router.endpoints.model.encoded", noted)

    async def test(cluster: Any) -> None:
        for text in ("a", " a" * 70_000):
            answer = await cluster.http.post("/tokenize", json={"prompt": text})
            assert answer.status_code == 200
            assert answer.headers["content-type"] == "application/json"
            tokens = cluster.tokenizer.encode(text)
            assert answer.json() == {"tokens": tokens, "count": len(tokens), "max_model_len": 8192}

    run_cluster(test)
    (_, short), (thread, long) = written
    assert (short, long) == (False, True)
    assert thread.startswith("tandem-text")
