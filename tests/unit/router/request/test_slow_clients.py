"""A client that takes its answer slowly, or goes: what the workers hold for it does not wait for it."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from protocol.sampling import SamplingParams
from protocol.trace import new_trace
from router.request.answer import Delta
from router.request.generation import Generation, RequestIdentity

Run = Callable[..., None]
TEXT = "one two three four five six seven eight nine ten"


def answer(cluster: Any, max_tokens: int = 40, num_choices: int = 1) -> AsyncGenerator[Delta, None]:
    """An answer to a short prompt, of which only what is asked for is taken."""
    sampling = SamplingParams(seed=0, max_tokens=max_tokens, stop_token_ids=(2,))
    generation = Generation((5, 6, 7), sampling, (), "", num_choices, None)
    identity = RequestIdentity("r", new_trace(), time.monotonic())
    deltas: AsyncGenerator[Delta, None] = cluster.router.generate([generation], identity)
    return deltas


def test_a_ticket_is_attached_while_the_first_token_is_not_taken(run_cluster: Run) -> None:
    """Committed KV has to be attached within a lease. A late attach would be held against a healthy pair of workers."""

    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        [decode] = cluster.decode
        deltas = answer(cluster)
        first = await anext(deltas)
        await cluster.until(lambda: bool(decode.attached), "it waits for the client")
        assert first.text + "".join([delta.text async for delta in deltas]) == TEXT
        await cluster.clean()

    run_cluster(test)


def test_a_client_that_goes_at_the_first_token_leaves_nothing(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        [decode] = cluster.decode
        errors: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        decode.kv_gate.clear()
        for refused in (0, 1, 0):
            decode.refuse_attach = refused
            before = asyncio.all_tasks()
            deltas = answer(cluster)
            await anext(deltas)
            for _ in range(10):
                await asyncio.sleep(0.005)  # so that the attach is under way, has failed, or has come about
            await deltas.aclose()
            await cluster.clean()
            left = {task for task in asyncio.all_tasks() - before if "attach" in repr(task.get_coro())}
            assert not left
            gc.collect()
            decode.kv_gate.set()
        assert not errors, "what a task raised was asked for"

    run_cluster(test)


def test_an_answer_of_one_token_attaches_nowhere(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        deltas = answer(cluster, max_tokens=1)
        assert len([delta async for delta in deltas]) == 1
        assert not cluster.decode[0].attached
        await cluster.clean()

    run_cluster(test)
