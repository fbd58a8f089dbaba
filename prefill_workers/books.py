"""The prefill role's part of a worker's books for an audit (`protocol.audit`): what it holds for which ticket."""

from __future__ import annotations

from collections.abc import Mapping

from prefill_workers.scheduler import PrefillScheduler, Prompt
from protocol.audit import PromptRow
from worker.roles import RoleBooks


def prefill_books(scheduler: PrefillScheduler, prompts: Mapping[Prompt, PromptRow]) -> RoleBooks:
    """What is held for prompts, all at one moment, as an audit compares it. `prompts` are all that the worker knows of."""
    tables = [prompt.block_table.owned for prompt in prompts]
    holding = sum(map(bool, tables))
    problems = []
    if scheduler.num_held != holding:
        problems.append(f"the scheduler gave blocks to {scheduler.num_held} prompts, of which {holding} are known")
    return RoleBooks(tables=tables, prompts=tuple(prompts.values()), problems=tuple(problems))
