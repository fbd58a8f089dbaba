"""Owns the helper process, which decodes and checks large bodies before the router does.

    no process ──a large body──► starting ──► idle ◄──► working on one body
        ▲                                       │              │
        └──── idle for IDLE_S ◄─────────────────┘              │
        └──── it died, or did not answer in time ◄─────────────┘   an error for that body alone

The process runs `router.api.large.helper_main`. It gets the body, and answers with what is wrong with it or that nothing is.
What it let pass, the router decodes itself: objects don't cross from one process into another without being decoded again.
One task owns the process and the queue in front of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.errors import InvalidRequestError, OverloadedError
from router.api.body import Body
from router.api.large.helper_main import ANSWER_HEAD, REQUEST_HEAD, WALL_S

LARGE_BODY_BYTES = 256 * 1024
"""Bodies of more bytes are checked by the helper process first."""
IDLE_S = 10.0
MAX_WAITING = 16
"""Bodies that wait for the process; more are refused."""
_WAIT_S = 10.0
_ANSWER_S = WALL_S + 2.0
_START_S = 20.0
_END_S = 5.0
_COMMAND = (sys.executable, "-P", "-m", "router.api.large.helper_main")
_MACHINES = (-signal.SIGKILL, -signal.SIGALRM)
"""Ends of the process that no body is to blame for: it was killed for others' memory, or by the router that waited for too
long, or it got no processor."""
_FAILURES = (OSError, asyncio.IncompleteReadError, TimeoutError)
"""Errors of a helper process that does not answer."""


@dataclass(frozen=True)
class _Job:
    kind: str
    data: bytes
    problem: asyncio.Future[bytes]
    """What is wrong with the body, as the process says it; empty if nothing is."""


class BodyHelper:
    """The helper process and the bodies that wait for it. It starts with the first body, and ends with `close`."""

    def __init__(self, command: Sequence[str] = _COMMAND, *, idle_s: float = IDLE_S) -> None:
        self._command = command
        self._idle_s = idle_s
        self._queue: asyncio.Queue[_Job] = asyncio.Queue(MAX_WAITING)
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the helper; None while there is none."""
        return None if self._process is None else self._process.pid

    async def check(self, kind: type[Body], data: bytes) -> None:
        """Return if these bytes hold a body of this kind.

        Raises InvalidRequestError if they don't, or if that takes too much time or memory to find out; OverloadedError if too
        many bodies wait for it, or if the machine had no time or memory for it.
        """
        job = _Job(kind.__name__, data, asyncio.get_running_loop().create_future())
        busy = OverloadedError("too many large bodies are being read; try again", retry_after_s=1.0)
        try:
            self._queue.put_nowait(job)
        except asyncio.QueueFull:
            raise busy from None
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        try:
            async with asyncio.timeout(_WAIT_S):
                problem = await job.problem
        except TimeoutError:
            raise busy from None
        if problem:
            raise InvalidRequestError(**json.loads(problem))

    async def close(self) -> None:
        """End the process; returns when it has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _work(self) -> None:
        try:
            while True:
                job = await self._next()
                if job.problem.done():
                    continue  # nobody waits for it any longer
                try:
                    problem = await self._answer(job)
                except Exception as error:  # noqa: BLE001 - raised where the body is waited for; others come after it
                    await self._end()
                    if not job.problem.done():
                        job.problem.set_exception(error)
                else:
                    if not job.problem.done():
                        job.problem.set_result(problem)
        finally:
            await self._end()

    async def _next(self) -> _Job:
        try:
            async with asyncio.timeout(self._idle_s):
                return await self._queue.get()
        except TimeoutError:
            await self._end()
        return await self._queue.get()

    async def _answer(self, job: _Job) -> bytes:
        """Raises InvalidRequestError or OverloadedError if the process does not answer."""
        process = await self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        kind = job.kind.encode()
        try:
            async with asyncio.timeout(_ANSWER_S):
                process.stdin.write(REQUEST_HEAD.pack(len(kind), len(job.data)) + kind)
                process.stdin.write(job.data)
                await process.stdin.drain()
                [size] = ANSWER_HEAD.unpack(await process.stdout.readexactly(ANSWER_HEAD.size))
                return await process.stdout.readexactly(size)
        except _FAILURES:
            ended = await self._end()
            if ended in _MACHINES:
                raise _machine_is_short() from None
            raise InvalidRequestError("the body takes too much time or memory to read") from None

    async def _started(self) -> asyncio.subprocess.Process:
        """The process, when it is ready for a body. Raises OverloadedError if it does not start, whatever the body is."""
        if self._process is None:
            try:
                await self._start()
            except (*_FAILURES, RuntimeError):  # the latter where no thread could be started
                raise _machine_is_short() from None
        assert self._process is not None
        return self._process

    async def _start(self) -> None:
        pipe, path = asyncio.subprocess.PIPE, os.pathsep.join(filter(None, sys.path))
        # Pydantic panics where it gets no memory. To print where from takes memory, too, and it hangs in that.
        environment = os.environ | {"PYTHONPATH": path, "RUST_BACKTRACE": "0"}
        self._process = await asyncio.create_subprocess_exec(*self._command, stdin=pipe, stdout=pipe, env=environment)
        assert self._process.stdout is not None
        async with asyncio.timeout(_START_S):
            await self._process.stdout.readexactly(ANSWER_HEAD.size)

    async def _end(self) -> int | None:
        """How the process ended: its exit code, or minus the signal. None if there was none.

        If it is cancelled the process is still there, for the next call.
        """
        process = self._process
        if process is None:
            return None
        assert process.stdin is not None
        assert process.stdout is not None
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)  # `process.kill` may reap it, and how it ended would be lost
        ended = await process.wait()
        if not process.stdin.is_closing():
            process.stdin.transport.abort()  # what it has not read is not waited for
        with contextlib.suppress(*_FAILURES):
            async with asyncio.timeout(_END_S):
                await process.stdout.read()  # asyncio closes what is open when this pipe has ended, too
        for _ in range(3):  # turns of the loop in which it closes what is open
            await asyncio.sleep(0)
        self._process = None
        return ended


def _machine_is_short() -> OverloadedError:
    return OverloadedError("there is no time or memory to read the body now; try again", retry_after_s=1.0)
