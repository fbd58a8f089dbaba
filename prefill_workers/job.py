"""One prompt at a prefill worker, from its message until its KV is handed over."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from engine.batch import Chunk
from engine.grammar import Constraint
from engine.scoring import PromptScores
from kv_transfer.sender import OutgoingTransfer, PushPart, SendingPair
from prefill_workers.scheduler import PlannedChunk, Prompt
from protocol.audit import PromptRow
from protocol.messages.decode import Prefilled
from protocol.messages.prefill import Prefill


@dataclass(eq=False)
class Job:
    """One Prefill message and its prompt, until the KV is handed over."""

    router: bytes
    message: Prefill
    prompt: Prompt
    transfer: OutgoingTransfer
    arrived: float
    scores: PromptScores | None
    """Collects the logprobs of the prompt, if they are wanted."""
    constraint: Constraint | None = None
    """The grammar of the answer, if it has one."""
    pair: SendingPair | None = None
    """The pair that the KV is sent over. None when the answer is one token long: nothing is handed over."""
    last_push: asyncio.Future[None] | None = None
    """Ends with the last push so far, and so with all before it. None as long as decode holds what was computed."""
    began: float | None = None
    answered: bool = False
    stopped: bool = False
    """Whether nothing more is to be computed or sent for it."""
    in_step: bool = False

    def row(self) -> PromptRow:
        """The job as an audit sees it."""
        ticket = self.message.ticket
        decode, blocks = ticket.worker, self.prompt.block_table.num_owned
        return PromptRow(
            ticket_id=ticket.ticket_id,
            transfer_id=ticket.transfer_id,
            decode_id=decode.worker_id,
            decode_epoch=decode.epoch,
            num_blocks=blocks,
            in_step=self.in_step,
            stopped=self.stopped,
        )

    def prefilled(self, prefill_s: float) -> Prefilled:
        """What its router is told of the prompt, which took this long from its first chunk to the token."""
        prompt_logprobs = None if self.scores is None else self.scores.packed()
        return Prefilled(prefill_s, self.prompt.cached, prompt_logprobs, self.prompt.brought)

    def part(self, start: int, end: int) -> PushPart:
        """What a push sends of these tokens."""
        return PushPart(self.transfer, self.prompt.block_table, start, end - start)

    def chunk(self, planned: PlannedChunk) -> Chunk:
        """What the engine computes of the prompt in the next step."""
        message, end = self.message, planned.start + planned.num_tokens
        return Chunk(
            token_ids=message.token_ids[planned.start : end],
            start=planned.start,
            block_table=planned.prompt.block_table,
            sampling=message.sampling if planned.last else None,
            num_generated=message.num_generated,
            history=message.token_ids,
            scores=self.scores,
            constraint=self.constraint if planned.last else None,
        )
