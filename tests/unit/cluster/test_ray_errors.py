"""Failures as Ray reports them become sentences of ours."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from cluster.ray.errors import answer, original, wait_for
from protocol.errors import ConfigError, TandemError, UnavailableError, WorkerLostError

DEATH = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: WorkerProcess\n"
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
    "unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was killed"
)


def raised_in_an_actor(cause: BaseException) -> RayTaskError:
    return RayTaskError("start", "Traceback ...", cause)


async def failing(error: Exception) -> Any:
    raise error


def test_our_own_errors_come_through_as_they_were() -> None:
    error = ConfigError("no such model", param="model")
    found = original(raised_in_an_actor(error))
    assert isinstance(found, ConfigError)
    assert (found.message, found.param) == ("no such model", "model")
    nested = ExceptionGroup("tasks", [ExceptionGroup("more", [error])])
    assert original(raised_in_an_actor(nested)) is error


def test_anything_else_is_a_lost_worker_in_one_line() -> None:
    found = original(raised_in_an_actor(RuntimeError("out of memory\nat step 3")))
    assert isinstance(found, WorkerLostError)
    assert found.message == "RuntimeError: out of memory"
    assert original(raised_in_an_actor(ValueError())).message == "ValueError: ValueError"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (raised_in_an_actor(ConfigError("no such model")), "no such model"),
        (RayActorError(error_msg=DEATH), "its process ended: Worker unexpectedly exits with a connection error code 2"),
        (RayActorError(), "its process ended: The actor experienced an error before finishing this task."),
    ],
)
def test_awaited_answers(error: Exception, message: str) -> None:
    with pytest.raises(TandemError) as caught:
        asyncio.run(answer(failing(error)))
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (raised_in_an_actor(ConfigError("no such model")), ConfigError, "no such model"),
        (
            RayActorError(error_msg=DEATH),
            UnavailableError,
            "it is gone: The actor died unexpectedly before finishing this task.",
        ),
        (GetTimeoutError("not within 2 s"), UnavailableError, "it is gone: not within 2 s"),
    ],
)
def test_answers_that_a_thread_waits_for(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[TandemError], message: str
) -> None:
    def get(reference: Any, timeout: float | None) -> Any:
        raise error

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(kind) as caught:
        wait_for(None, 2.0, "it is gone")
    assert caught.value.message == message
