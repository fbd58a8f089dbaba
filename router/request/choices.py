"""A request of several choices: which prompt they share, and their pieces in one stream.

    first choice of a prompt ──► prefilled, KV at a pair of workers ──► the others begin there, as cache hits
    every choice ──► pieces, in the order in which they come ──► one response

A choice is a request of its own to the workers: it waits its turn, holds a ticket, and goes on elsewhere when a worker is lost.
One that fails ends all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Container, Iterable, Iterator
from dataclasses import dataclass

from protocol.sampling import PromptLogprobs
from router.request.answer import Delta

MAX_AT_ONCE = 32
"""The most choices of one request that are at the workers at the same time; the others follow as these end."""


@dataclass(frozen=True)
class EmittedChoice:
    """The part of one choice that its client has got already, from a stream that is now resumed."""

    token_ids: tuple[int, ...] = ()
    ended: bool = False
    """The client has its finish reason, too."""


def emitted_choices(deltas: Iterable[Delta], num_choices: int) -> list[EmittedChoice]:
    """Sum up what these pieces of a response told of each of its choices, in the order of their indices."""
    token_ids: list[list[int]] = [[] for _ in range(num_choices)]
    ended: set[int] = set()
    for delta in deltas:
        token_ids[delta.index] += delta.token_ids
        if delta.finish_reason is not None:
            ended.add(delta.index)
    return [EmittedChoice(tuple(ids), index in ended) for index, ids in enumerate(token_ids)]


class _Others(Container[str]):
    """All workers but a few."""

    def __init__(self, few: frozenset[str]) -> None:
        self._few = few

    def __contains__(self, worker_id: object) -> bool:
        return worker_id not in self._few


class SharedPrompt:
    """Where the KV of a prompt of several choices is to be found. The first choice says so; the others wait for it."""

    def __init__(self) -> None:
        self._known = asyncio.Event()
        self._pair: frozenset[str] = frozenset()
        self.logprobs: PromptLogprobs | None = None
        """The logprobs of the prompt's tokens, if they were asked for, from when the first choice has begun."""

    def placed(self, *worker_ids: str) -> None:
        """Note that the prompt's KV is cached at these workers."""
        self._pair = frozenset(worker_ids)
        self._known.set()

    def given_up(self) -> None:
        """Note that the first choice has ended, so that nobody waits for it any more. Changes nothing after `placed`."""
        self._known.set()

    async def elsewhere(self) -> Container[str]:
        """Wait until the prompt is placed, and return the workers that don't have its KV; empty if none has.

        Waits no longer than the first choice lives.
        """
        await self._known.wait()
        return _Others(self._pair) if self._pair else ()


async def interleaved(answers: Iterator[AsyncGenerator[Delta, None]], number: int) -> AsyncGenerator[Delta, None]:
    """Yield the pieces of so many choices as they come, each of which is taken from `answers` when it is to begin.

    Closing it closes all that have begun; what one raises is raised here.
    """
    if number == 1:
        async with contextlib.aclosing(next(answers)) as pieces:
            async for delta in pieces:
                yield delta
        return
    # Whoever takes the pieces slowly holds up the answers, as with one.
    queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(MAX_AT_ONCE)

    async def work() -> None:
        try:
            for answer in answers:
                async with contextlib.aclosing(answer) as pieces:
                    async for delta in pieces:
                        await queue.put(delta)
            await queue.put(None)
        except Exception as error:  # noqa: BLE001 - raised where the pieces are read
            await queue.put(error)

    workers = [asyncio.create_task(work()) for _ in range(min(MAX_AT_ONCE, number))]
    running = len(workers)
    try:
        while running:
            piece = await queue.get()
            if isinstance(piece, Exception):
                raise piece
            if piece is None:
                running -= 1
            else:
                yield piece
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
