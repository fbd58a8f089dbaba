"""Where the time of one answer went: the line from its request's arrival to now, cut into stages without a hole.

    arrival ─PREPARE─ QUEUE ─► pair chosen, blocks held
            ─PREFILL_QUEUE─ FETCHED ─ PREFILL ─► first token
            ─HANDOFF_WAIT─ TRANSFER ─► attached
            ─DECODE_QUEUE─ DECODE_STEP ─DECODE_GAP─ DECODE_STEP ... ─► last token
            ─SEND─ now                     an attempt that failed: all since its latest mark is LOST, and QUEUE begins again

Moments are `time.monotonic()` of the router's process, in seconds. Workers have clocks of their own, so they report durations.
Each duration is taken out of the stretch between the two moments at the router that enclose it. What is left of the stretch is
the stage before it, messages on their way included. So the stages always sum up to the whole.

What runs beside something else is in no stage: KV that is sent while later layers are computed, and text that is sent while the
next step is computed. TRANSFER is only what the first decode step had to wait for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Stage(Enum):
    """What an answer's time is spent on. The stages follow each other in this order."""

    PREPARE = "prepare"
    """Reading, checking and tokenizing the request."""
    QUEUE = "queue"
    """Waiting for room and reserving blocks. A resumed answer does so again."""
    PREFILL_QUEUE = "prefill_queue"
    """Waiting at prefill, from the choice of a pair to the prompt's first chunk, but for FETCHED."""
    FETCHED = "fetched"
    """Getting KV of the prompt's beginning out of other pools or tiers."""
    PREFILL = "prefill"
    """Computing the prompt, from its first chunk to the first token."""
    HANDOFF_WAIT = "handoff_wait"
    """From the first token until the decode worker has attached, but for TRANSFER: messages, and a grammar's state."""
    TRANSFER = "transfer"
    """What the decode worker, asked to attach, still waited for KV, its commit and the check of it."""
    DECODE_QUEUE = "decode_queue"
    """Waiting for a seat, from the moment the stream is attached to its first step."""
    DECODE_STEP = "decode_step"
    """Computing, in the steps that produced tokens of this answer."""
    DECODE_GAP = "decode_gap"
    """Between those steps: planning, frames on their way, preemption, recomputing."""
    SEND = "send"
    """Since the last token: making text of it, releasing the workers, waiting for the client to take what was sent."""
    LOST = "lost"
    """Work that a failure made worthless, and what was under way when a request ended early."""


@dataclass(frozen=True)
class Stretch:
    """A piece of an answer's time that was spent on one stage. All decode steps and gaps of an attempt are one piece."""

    stage: Stage
    start: float
    end: float


class RequestTimes:
    """Where one answer's time goes, noted by the pipeline as it goes on. `arrival` and all moments are `time.monotonic()`."""

    def __init__(self, arrival: float) -> None:
        self.arrival = arrival
        self.first_token: float | None = None
        self.finish: float | None = None
        """The answer has come to its end, as its text has shown."""
        self.placed_by: str | None = None
        """Why the latest attempt's prompt is computed where it is (`router.rules.pair.Reason`)."""
        self.handed_over = False
        """Some attempt's prompt was computed at another worker than the one that decodes, and its KV was handed over."""
        self.resumes = 0
        self.token_gaps: list[float] = []
        """Seconds from each output of the workers to the next; the first is from the first token to the second."""
        self.stretches: list[Stretch] = []
        self._spent: dict[Stage, float] = {}
        self._mark = self._latest_output = arrival

    def spent(self, stage: Stage) -> float:
        """Seconds spent on this stage, without what has not come to its end."""
        return self._spent.get(stage, 0.0)

    @property
    def was_admitted(self) -> bool:
        """A pair of workers had room for the answer, at least once."""
        return Stage.QUEUE in self._spent

    @property
    def handoff_s(self) -> float | None:
        """Seconds from the first token until the decode worker had the KV; None if nothing was handed over."""
        return self.spent(Stage.HANDOFF_WAIT) + self.spent(Stage.TRANSFER) if self.handed_over else None

    def prepared(self) -> None:
        """Note that the request is checked and tokenized."""
        self._reach(time.monotonic(), Stage.PREPARE)

    def admitted(self, reason: str) -> None:
        """Note that a pair of workers has room, and why it was chosen."""
        self.placed_by = reason
        self._reach(time.monotonic(), Stage.QUEUE)

    def prefilled(self, prefill_s: float, fetch_s: float = 0.0) -> None:
        """Note the first token, or on a resumed stream the next one, and for how many seconds the worker computed, and fetched
        before that.
        """
        now = time.monotonic()
        if self.first_token is None:
            self.first_token = now
        else:
            self.token_gaps.append(now - self._latest_output)
        self._latest_output = now
        if fetch_s:
            self._reach(now - prefill_s, Stage.PREFILL_QUEUE, Stage.FETCHED, fetch_s)
        self._reach(now, Stage.PREFILL_QUEUE, Stage.PREFILL, prefill_s)

    def attached(self, transfer_s: float, *, handed_over: bool = True) -> None:
        """Note that the decode worker has the KV, and for how many seconds it had to wait for it. It is not `handed_over` where
        the decode worker has computed the prompt itself.
        """
        self.handed_over |= handed_over
        self._reach(time.monotonic(), Stage.HANDOFF_WAIT, Stage.TRANSFER, transfer_s)

    def stepped(self, arrived: float, step_s: float) -> None:
        """Note that tokens came at this moment, out of a step that took so many seconds."""
        decoding = bool(self.stretches) and self.stretches[-1].stage is Stage.DECODE_STEP
        self.token_gaps.append(max(0.0, arrived - self._latest_output))
        self._latest_output = arrived
        self._reach(arrived, Stage.DECODE_GAP if decoding else Stage.DECODE_QUEUE, Stage.DECODE_STEP, step_s)

    def lost(self) -> None:
        """Note that this attempt has failed."""
        self._reach(time.monotonic(), Stage.LOST)

    def stages(self, now: float) -> dict[str, float]:
        """Seconds by stage up to now, in the order of the stages; those that were not reached are left out."""
        last = Stage.LOST if self.finish is None else Stage.SEND
        spent = self._spent | {last: self.spent(last) + max(0.0, now - self._mark)}
        return {stage.value: spent[stage] for stage in Stage if stage in spent}

    def line(self, now: float) -> list[Stretch]:
        """The stretches up to now, in order, without those that took no time."""
        last = Stretch(Stage.LOST if self.finish is None else Stage.SEND, self._mark, max(now, self._mark))
        return [stretch for stretch in (*self.stretches, last) if stretch.end > stretch.start]

    def summary(self, now: float) -> dict[str, Any]:
        """Seconds by stage, time to first token, longest gap and total, and why its workers were chosen, for the log line of
        the request.
        """
        known: dict[str, Any] = {f"{stage}_s": seconds for stage, seconds in self.stages(now).items()}
        if self.first_token is not None:
            known["ttft_s"] = self.first_token - self.arrival
        if self.token_gaps:
            known["longest_gap_s"] = max(self.token_gaps)
        placed = {} if self.placed_by is None else {"placed_by": self.placed_by}
        return known | {"total_s": now - self.arrival, "resumes": self.resumes} | placed

    def report(self, now: float) -> dict[str, Any]:
        """Seconds by stage, total, time to first token, every gap between tokens, the number of resumes, and why the prompt was
        computed where it was, for the client who asked.
        """
        return {
            "stages": {stage: round(seconds, 6) for stage, seconds in self.stages(now).items()},
            "total": round(now - self.arrival, 6),
            "ttft": None if self.first_token is None else round(self.first_token - self.arrival, 6),
            "token_gaps": [round(gap, 6) for gap in self.token_gaps],
            "resumes": self.resumes,
            "placed_by": self.placed_by,
        }

    def _reach(self, moment: float, before: Stage, stage: Stage | None = None, seconds: float = 0.0) -> None:
        """Cut the line from the latest mark to this moment: `stage` are its last `seconds`, `before` is what comes ahead of it.

        A worker's duration that is longer than the whole stretch, as rounding of clocks may have it, fills it.
        """
        moment = max(moment, self._mark)
        cut = moment if stage is None else max(self._mark, moment - max(0.0, seconds))
        self._add(before, self._mark, cut)
        if stage is not None:
            self._add(stage, cut, moment)
        self._mark = moment

    def _add(self, stage: Stage, start: float, end: float) -> None:
        self._spent[stage] = self.spent(stage) + (end - start)
        decoding = bool(self.stretches) and self.stretches[-1].stage is Stage.DECODE_STEP
        if decoding and stage in (Stage.DECODE_GAP, Stage.DECODE_STEP):
            start = self.stretches.pop().start
            stage = Stage.DECODE_STEP
        self.stretches.append(Stretch(stage, start, end))
