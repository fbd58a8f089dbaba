"""Many requests at once: as many files are open as the system allows, and what it does not allow is not the server's fault."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from loadtest.open_files import allow_connections
from protocol.errors import InvalidRequestError
from tests.unit.loadtest.openai_server import OpenAiServer
from tests.unit.loadtest.test_load_runs import OPTIONS, bench


@pytest.fixture
def few_files() -> Iterator[None]:
    """A soft limit with room for a few more files than are open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))  # there may be holes below it
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 40, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_files")
def test_the_limit_on_open_files_is_raised() -> None:
    finished = bench(OpenAiServer(first_s=0.3), num_prompts=60)
    assert (finished.figures["completed"], finished.figures["failed"]) == (60, 0)


def test_more_requests_at_once_than_the_system_allows_are_refused_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (100, 100))
    with pytest.raises(InvalidRequestError, match="50 requests at once need 114 open files, and this system allows 100"):
        allow_connections(dataclasses.replace(OPTIONS, num_prompts=50))
    for fits in ({"num_prompts": 36}, {"num_prompts": 50, "max_concurrency": 36}, {"num_prompts": 50, "request_rate": 9.0}):
        allow_connections(dataclasses.replace(OPTIONS, **fits))


def test_connections_that_this_machine_refuses_are_its_own_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, made = asyncio.BaseEventLoop.create_connection, []

    async def refusing(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        if len(made) > 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return await connect(*args, **kwargs)

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", refusing)
    finished = bench(OpenAiServer(first_s=0.3))
    assert finished.figures["failed"] == 2
    assert finished.client.own_failures == 2
    assert "this client failed 2 requests itself" in str(finished.client.warning)


def test_figures_need_no_module_that_is_not_there_yet() -> None:
    code = (
        "import sys, loadtest.runner; before = set(sys.modules); loadtest.runner._p99([1.0]); print(set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
