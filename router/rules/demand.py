"""Counts what is asked of a router and how well it answers, for the autoscaler. Pure."""

from __future__ import annotations

from dataclasses import replace

from protocol.cluster_view import DemandCounts, WorkerSeen
from protocol.messages.load import LoadReport
from protocol.messages.workers import Role


class DemandCounter:
    """The counts of one router since its start."""

    def __init__(self, ttft_s: float, tpot_s: float) -> None:
        """The limits that answers are to keep, in seconds."""
        self._ttft_s = ttft_s
        self._tpot_s = tpot_s
        self.counts = DemandCounts()

    def arrived(self, prompt_tokens: int) -> None:
        """Count a request that has arrived."""
        counts = self.counts
        self.counts = replace(
            counts,
            arrived=counts.arrived + 1,
            prompt_tokens=counts.prompt_tokens + prompt_tokens,
            squared_tokens=counts.squared_tokens + prompt_tokens**2,
        )

    def first_token(self, ttft_s: float, prompt_tokens: int) -> None:
        """Count the first token after a prompt of this length, so many seconds after its request."""
        counts, in_time = self.counts, ttft_s <= self._ttft_s
        self.counts = replace(
            counts,
            first_tokens=counts.first_tokens + 1,
            first_in_time=counts.first_in_time + in_time,
            read_tokens=counts.read_tokens + prompt_tokens,
        )

    def ended(self, answer_tokens: int, after_first_s: float) -> None:
        """Count an answer that has ended, so many seconds after its first token."""
        counts, is_paced = self.counts, answer_tokens > 1
        in_pace = is_paced and after_first_s <= self._tpot_s * (answer_tokens - 1)
        self.counts = replace(
            counts,
            ended=counts.ended + 1,
            answer_tokens=counts.answer_tokens + answer_tokens,
            paced=counts.paced + is_paced,
            in_pace=counts.in_pace + in_pace,
        )


def seen(report: LoadReport, role: Role, block_size: int) -> WorkerSeen:
    """A worker of this role as its load report says."""
    return WorkerSeen(
        worker_id=report.worker_id,
        epoch=report.epoch,
        role=role,
        busy_s=report.busy_s + report.step_age_s,
        computed_tokens=report.prefilled_tokens,
        running=report.running,
        waiting=report.waiting,
        queued_tokens=report.queued_tokens,
        kv_usage=report.kv_usage,
        step_s=report.decode.step_s if report.decode else 0.0,
        held_tokens=(report.total_blocks - report.free_blocks) * block_size,
    )
