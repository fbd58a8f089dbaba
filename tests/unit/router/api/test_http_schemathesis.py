"""schemathesis, an independent client, reads the OpenAPI document and sends what it makes of it, right and wrong."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from benchmarks.clients.api_cases import Cases, command
from cluster.commands.lib.key_file import add_key
from configs.schema import HttpConfig
from protocol.messages.workers import Role
from router.api.body import Body
from router.api.chat.body import ChatBody
from router.api.completions.body import CompletionBody
from router.api.responses.body import ResponsesBody
from router.api.tools.bodies import TokenizeBody

Run = Callable[..., None]


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, ResponsesBody, TokenizeBody])
def test_schemathesis_can_make_requests_of_every_body(body: type[Body]) -> None:
    """The library under it gives up where the rules of `Body.together` multiply to too many cases."""
    schema = jsonschema_rs.canonicalize(body.model_json_schema(), draft=jsonschema_rs.Draft202012)
    assert schema.kind is not jsonschema_rs.canonical.CanonicalKind.RAW


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_answers_are_as_documented(run_cluster: Run, tmp_path: Path) -> None:
    """Status, headers, media type and shape of each answer, at every endpoint, with keys of both kinds."""
    key = add_key(tmp_path / "keys.json", {"tenant": "a"})
    keys = {"TANDEM_API_KEY": key, "TANDEM_ADMIN_KEY": "operator"}
    report = tmp_path / "report.ndjson"

    async def test(cluster: Any) -> None:
        cluster.says('Hello {"a": 1} world.')
        client = await asyncio.create_subprocess_exec(
            *command(cluster.url, report, max_examples=40, seed=0),
            env=os.environ | keys,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=tmp_path,
        )
        said, _ = await client.communicate()
        assert client.returncode == 0, said.decode()
        assert {role for role, _ in cluster.controller.scaled} == set(Role), "only a script"
        await cluster.clean()

    http = HttpConfig(keys_file=str(tmp_path / "keys.json"), admin_key="operator").model_dump()
    any_priority = {"standard": {"earliest_priority": -20}}
    run_cluster(test, http=http, tiers=any_priority, max_model_len=128, deadline_s=390)

    cases = Cases.read(report)
    assert cases.number >= 2000
    assert len(cases.positive) == 19, "all endpoints"
    for path in ("chat/completions", "completions", "responses"):
        answered = cases.positive[f"POST /v1/{path}"]
        assert answered[200] >= 10, f"{path}: {answered}; not only refusals were looked at"
