"""Large and hostile bodies over real sockets: nobody else waits for them, and each is refused by itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from protocol.errors import InvalidRequestError, OverloadedError
from router.api.body import parse_body
from router.api.completions.body import CompletionBody
from router.api.large import helper
from router.api.large.helper import LARGE_BODY_BYTES, BodyHelper
from router.api.large.helper_main import KINDS, REQUEST_HEAD
from router.api.tools import bodies
from router.text.threads import TextThreads
from tests.hostile_bodies import CHAT, PLAIN, SHAPES
from tests.unit.router.conftest import eventually

JSON = {"content-type": "application/json"}
LONG = json.dumps({"model": "smollm2", "prompt": "word " * 60_000}).encode()
MANY = json.dumps({"model": "smollm2", "prompt": list(range(250_000))}).encode()


def test_the_helper_knows_every_body_of_its_own_module() -> None:
    written = {name for name, each in vars(bodies).items() if name.endswith("Body") and each.__module__ == bodies.__name__}
    assert written <= KINDS.keys()


async def post(cluster: Any, path: str, data: bytes) -> httpx.Response:
    response: httpx.Response = await cluster.http.post(path, content=data, headers=JSON)
    return response


@asynccontextmanager
async def watched_loop() -> AsyncIterator[list[float]]:
    """The longest pause of this loop, in seconds, is the list's last entry when the block ends. What this process was held by
    others is none: a pause is no longer than what it computed meanwhile.
    """
    pauses = [0.0]

    async def watch() -> None:
        while True:
            begun, computed = time.monotonic(), time.process_time()
            await asyncio.sleep(0.001)
            pauses[0] = max(pauses[0], min(time.monotonic() - begun, time.process_time() - computed))

    watching = asyncio.create_task(watch())
    try:
        yield pauses
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def test_hostile_bodies_hold_up_nobody(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        for shape, (path, build) in SHAPES.items():
            for size in (2**20, 4 * 2**20 - 64):
                body = build(size)
                begun = time.monotonic()
                async with watched_loop() as pauses:
                    response = await post(cluster, path, body)
                assert response.status_code == 400, (shape, response.text[:300])
                assert time.monotonic() - begun < 20.0, shape
                assert pauses[0] < 0.3, shape
        await cluster.clean()

    run_cluster(test)


def test_a_long_text_is_read_beside_the_loop() -> None:
    """A search for infinite numbers in all of its bytes once held the interpreter for 0.2 s."""
    data = json.dumps({"model": "smollm2", "prompt": "word " * 800_000}).encode()

    async def main() -> None:
        threads = TextThreads()
        async with watched_loop() as pauses:
            body = await threads.run("acme", parse_body, CompletionBody, data)
        threads.close()
        assert len(body.prompt) == 4_000_000
        assert pauses[0] < 0.1

    asyncio.run(main())


def test_too_large_a_body_is_refused_while_it_comes(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        path, build = SHAPES["empty strings"]
        assert (await post(cluster, path, build(16 * 2**20))).status_code == 413
        sent = 0

        async def endless() -> AsyncIterator[bytes]:
            nonlocal sent
            while sent < 2**26:
                yield b" " * 2**16
                sent += 2**16

        response = await cluster.http.post(path, content=endless(), headers=JSON)
        assert response.status_code == 413, "also without a content-length"

    run_cluster(test)


def test_a_long_prompt_is_checked_in_the_helper_process(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        body_helper = cluster.router.body_helper
        assert (await cluster.complete(max_tokens=1)).status_code == 200
        assert not body_helper.pid, "what is not needed does not run"
        assert len(LONG) > LARGE_BODY_BYTES
        response = await post(cluster, PLAIN, LONG)
        assert response.json()["error"]["code"] == "context_length_exceeded"
        first = body_helper.pid
        assert first
        wrong = await post(cluster, PLAIN, LONG.replace(b"smollm2", b'smollm2", "seed": "x'))
        assert wrong.json()["error"]["param"] == "seed", "it says what is wrong as the router does"
        os.kill(first, signal.SIGKILL)
        await post(cluster, PLAIN, LONG)
        response = await post(cluster, PLAIN, LONG)
        assert response.json()["error"]["code"] == "context_length_exceeded", "another one has taken its place"
        assert body_helper.pid not in (None, first)

    run_cluster(test)


def test_a_prompt_longer_than_the_context_is_not_tokenized_whole(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        most = 8192
        for body in (
            {"prompt": "q" * 600_000},
            {"prompt": "\x7f" * 1_000_000},
            {"prompt": [1] * most},
            {"prompt": [[1], [1] * most]},
            {"prompt": ["a", "word " * 20_000]},
        ):
            response = await cluster.complete(**body)
            assert response.json()["error"]["code"] == "context_length_exceeded", body
        chat = {"model": "smollm2", "messages": [{"role": "user", "content": "a " * 150_000}]}
        assert (await cluster.http.post(CHAT, json=chat)).json()["error"]["code"] == "context_length_exceeded"
        shortened = await cluster.http.post(CHAT, json=chat | {"truncation": "auto"})
        assert "at most 262144 characters" in shortened.json()["error"]["message"]
        counted = await cluster.http.post("/tokenize", json={"prompt": "a " * 150_000})
        assert "at most 262144 characters" in counted.json()["error"]["message"]
        counted = await cluster.http.post("/tokenize", json={"prompt": "a " * 100_000})
        assert counted.json()["count"] > most, "tokens are counted beyond the context too"
        spelled = await cluster.http.post("/detokenize", json={"tokens": [1] * 70_000})
        assert "at most 65536 token ids" in spelled.json()["error"]["message"]

    run_cluster(test)


def test_a_schema_that_would_fill_the_memory_is_refused(run_cluster: Callable[..., None]) -> None:
    schema = {"allOf": [{"type": "string", "pattern": f".*a{index}.*"} for index in range(100)]}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}

    async def test(cluster: Any) -> None:
        async with watched_loop() as pauses:
            chat = {"model": "smollm2", "messages": [{"role": "user", "content": "a"}], "response_format": wanted}
            response = await cluster.http.post(CHAT, json=chat)
        error = response.json()["error"]
        assert (error["param"], response.status_code) == ("response_format.json_schema.schema", 400)
        assert "too much time or memory" in error["message"]
        assert pauses[0] < 0.3

    run_cluster(test)


def script(text: str) -> tuple[str, ...]:
    """A helper process that says that it is ready, then runs this text."""
    return (sys.executable, "-c", f"import os, sys, time; os.write(1, bytes(4)); {text}")


def test_a_body_that_the_helper_dies_of_is_refused_alone() -> None:
    async def test() -> None:
        for text in ("sys.stdin.buffer.read(8)", "os._exit(1)"):
            body_helper = BodyHelper(script(text))
            with pytest.raises(InvalidRequestError, match="too much time or memory"):
                await body_helper.check(CompletionBody, LONG)
            assert body_helper.pid is None
            await body_helper.close()

    asyncio.run(test())


def test_a_body_is_not_to_blame_for_what_the_machine_does() -> None:
    async def test() -> None:
        for name in ("SIGALRM", "SIGKILL"):
            body_helper = BodyHelper(script(f"import signal; os.kill(os.getpid(), signal.{name})"))
            with pytest.raises(OverloadedError):
                await body_helper.check(CompletionBody, LONG)
            await body_helper.close()

    asyncio.run(test())


@pytest.mark.parametrize("command", [(sys.executable, "-c", "exit(1)"), ("/nowhere",), (sys.executable, "-c", "input()")])
def test_no_body_is_to_blame_for_a_helper_that_does_not_start(command: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper, "_START_S", 2.0)

    async def test() -> None:
        body_helper = BodyHelper(command)
        with pytest.raises(OverloadedError, match="no time or memory"):
            await body_helper.check(CompletionBody, LONG)
        assert body_helper.pid is None
        await body_helper.close()

    asyncio.run(test())


@pytest.mark.parametrize(
    ("error", "told"), [(RuntimeError("can't start new thread"), OverloadedError), (ValueError("unheard of"), ValueError)]
)
def test_bodies_are_checked_after_one_whose_helper_could_not_start(
    error: Exception, told: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that came later were once refused, as long as the router lived."""
    start = asyncio.create_subprocess_exec
    errors = [error]

    async def start_later(*args: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return await start(*args, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_later)

    async def test() -> None:
        size = REQUEST_HEAD.size + len(CompletionBody.__name__) + len(LONG)
        body_helper = BodyHelper(script(f"sys.stdin.buffer.read({size}); os.write(1, bytes(4)); time.sleep(60)"))
        with pytest.raises(told):
            await body_helper.check(CompletionBody, LONG)
        await body_helper.check(CompletionBody, LONG)
        await body_helper.close()

    asyncio.run(test())


STOPS_ITSELF = """
import os, signal
from router.api.large import helper_main
problem = helper_main.problem
def stopped(*args):
    os.kill(os.getpid(), signal.SIGSTOP)
    return problem(*args)
helper_main.problem = stopped
helper_main.main()
"""


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_good_body_is_let_in_after_its_helper_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper, "_WAIT_S", 60.0)

    async def test() -> None:
        body_helper = BodyHelper((sys.executable, "-c", STOPS_ITSELF))
        checking = asyncio.create_task(body_helper.check(CompletionBody, MANY))
        await eventually(lambda: body_helper.pid is not None and is_stopped(body_helper.pid))
        await asyncio.sleep(1.7)
        assert body_helper.pid is not None
        os.kill(body_helper.pid, signal.SIGCONT)
        await checking
        await body_helper.close()

    asyncio.run(test())


def test_a_good_body_is_let_in_after_its_router_was_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper, "_WAIT_S", 60.0)

    async def test() -> None:
        body_helper = BodyHelper()
        await body_helper.check(CompletionBody, LONG)
        checking = asyncio.create_task(body_helper.check(CompletionBody, MANY))
        await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_soon(time.sleep, 3.2)
        await checking
        await body_helper.close()

    asyncio.run(test())


@pytest.mark.parametrize(
    "limit",
    [
        "JOB_S = 0.05; helper_main.problem = lambda *_: any(iter(int, 1))",
        "_MAX_MEMORY = 2**22 + int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()",
    ],
)
def test_a_body_that_takes_too_much_time_or_memory_is_refused(limit: str) -> None:
    program = f"import resource; from router.api.large import helper_main; helper_main.{limit}; helper_main.main()"

    async def test() -> None:
        body_helper = BodyHelper((sys.executable, "-c", program))
        with pytest.raises(InvalidRequestError, match="too much time or memory"):
            await body_helper.check(CompletionBody, MANY)
        await body_helper.close()

    asyncio.run(test())


def test_the_helper_process_has_a_deadline_a_bounded_line_and_an_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper, "_ANSWER_S", 0.2)
    monkeypatch.setattr(helper, "_WAIT_S", 2.0)

    async def test() -> None:
        body_helper = BodyHelper(script("time.sleep(60)"))
        checks = [asyncio.create_task(body_helper.check(CompletionBody, LONG)) for _ in range(helper.MAX_WAITING + 2)]
        outcomes = await asyncio.gather(checks[0], checks[-1], return_exceptions=True)
        assert isinstance(outcomes[0], OverloadedError), "it says nothing, and nobody knows why"
        assert isinstance(outcomes[1], OverloadedError), "too many wait"
        await eventually(lambda: body_helper.pid is not None)
        pid = body_helper.pid
        assert pid is not None
        await body_helper.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        await asyncio.gather(*checks, return_exceptions=True)

    asyncio.run(test())


def test_a_helper_that_is_closed_while_its_process_ends_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left open the garbage collector closes one day, in the middle of whatever runs by then."""
    monkeypatch.setattr(helper, "_ANSWER_S", 0.5)

    async def test() -> None:
        body_helper = BodyHelper(script("time.sleep(60 if os.fork() else 1)"))  # its pipe outlives it
        checking = asyncio.create_task(body_helper.check(CompletionBody, LONG))
        await eventually(lambda: body_helper.pid is not None)
        process: Any = body_helper._process
        await eventually(lambda: not is_running(process.pid))
        await body_helper.close()
        assert process._transport.is_closing()
        checking.cancel()
        await asyncio.gather(checking, return_exceptions=True)

    asyncio.run(asyncio.wait_for(test(), 20))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_helper_process_ends_when_nobody_needs_it() -> None:
    async def test() -> None:
        body_helper = BodyHelper(idle_s=0.1)
        for _ in range(2):
            await body_helper.check(CompletionBody, LONG)
            assert body_helper.pid is not None
            await eventually(lambda: body_helper.pid is None)
        await body_helper.close()

    asyncio.run(test())
