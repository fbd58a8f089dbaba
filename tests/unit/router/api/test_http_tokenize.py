"""How the answers to `/tokenize` and `/detokenize` are written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from router.api.large.encoding import encoded

Run = Callable[..., None]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_a_long_answer_is_written_in_the_thread_that_found_it(
    run_cluster: Run, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A million ids would hold up the loop for 0.14 s. Slice by slice, they hold up no other thread either."""
    written: list[tuple[str, bool]] = []

    def noted(value: Any, *, large: bool) -> bytes:
        written.append((threading.current_thread().name, large))
        return encoded(value, large=large)

    monkeypatch.setattr("router.endpoints.model.encoded", noted)

    async def test(cluster: Any) -> None:
        for text in ("a", {"/tokenize": " a" * 70_000, "/detokenize": " question" * 10_000}[path]):
            tokens = cluster.tokenizer.encode(text)
            tokenized = {"tokens": tokens, "count": len(tokens), "max_model_len": 8192}
            body, wanted = ({"prompt": text}, tokenized) if path == "/tokenize" else ({"tokens": tokens}, {"prompt": text})
            answer = await cluster.http.post(path, json=body)
            assert answer.status_code == 200
            assert answer.headers["content-type"] == "application/json"
            assert answer.json() == wanted

    run_cluster(test)
    (_, short), (thread, long) = written
    assert (short, long) == (False, True)
    assert thread.startswith("tandem-text")
