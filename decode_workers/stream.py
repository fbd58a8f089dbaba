"""One stream of a decode worker. `decode_workers.scheduler` tells which states it goes through."""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decode_workers.rules.preemption import Holding
from decode_workers.rules.turns import Turn
from engine.grammar import Constraint
from engine.memory.block_table import BlockTable
from engine.scoring import PromptScores
from protocol.messages.load import NOTHING_BROUGHT, Brought
from protocol.sampling import SamplingParams
from protocol.share import NOBODYS, Share

if TYPE_CHECKING:  # imported only where tokens are guessed
    from decode_workers.speculation.speculator import StreamDrafts


@dataclass(eq=False)
class LocalPrefill:
    """What the router is told with the first token about a prompt that was computed here."""

    cached_tokens: int
    scores: PromptScores | None
    """Collects the logprobs of the prompt, if they are wanted."""
    brought: Brought = NOTHING_BROUGHT
    """KV of the prompt that was read from tiers instead of computed."""
    began: float | None = None
    """Time on `time.monotonic` at which the prompt's first chunk began."""


@dataclass(eq=False)
class Stream:
    """One attached ticket in the batch, or waiting preempted for its turn."""

    ticket_id: int
    owner: bytes
    block_table: BlockTable
    """The ledger's own: empty while preempted."""
    sampling: SamplingParams
    token_ids: MutableSequence[int]
    """Prompt and answer so far, as an array for penalties, which read it in place. When the stream runs, the next step computes
    the KV of the newest token."""
    num_generated: int
    computed: int
    """Number of leading tokens whose KV is in the pool: all but the newest when the stream runs."""
    constraint: Constraint | None = None
    """The grammar to be followed, if any, in its state after the newest token."""
    prefill: LocalPrefill | None = None
    """Set until the first token, if the prompt is computed here."""
    known: int = 0
    """Number of tokens whose KV has ever been in the pool. Computing these again is counted as recomputing."""
    pinned: bool = False
    """Whether its blocks are being sent to another worker. Such a stream is not preempted."""
    paused: bool = False
    """Whether the last of its blocks are being sent. Such a stream is not computed."""
    share: Share = NOBODYS
    """Right of the stream's tenant to seats and blocks."""
    seated: bool = True
    """Whether it has a seat in the present slice, if it can be computed."""
    preempted_at: float = 0.0
    """Time on the worker's clock at which it was preempted last."""
    drafts: StreamDrafts | None = None
    """What is known for guessing its tokens; None until some are looked for."""

    def __post_init__(self) -> None:
        self.known = max(self.known, self.computed)
        self._turn = Turn(self.ticket_id, self.share, self.num_generated)

    @property
    def scored(self) -> bool:
        """Whether this worker computes the stream's prompt, with the logprobs of all tokens of the prompt."""
        return self.prefill is not None and self.prefill.scores is not None

    @property
    def turn(self) -> Turn:
        """The stream as the turns see it now."""
        self._turn.generated = self.num_generated
        return self._turn

    @property
    def holding(self) -> Holding:
        """What the stream holds, for whoever decides who gives something back."""
        return Holding(
            ticket_id=self.ticket_id,
            share=self.share,
            num_blocks=self.block_table.num_owned,
            num_tokens=self.computed,
            young=self.turn.young,
            seated=self.seated,
            pinned=self.pinned,
        )

    @property
    def preempted(self) -> bool:
        """Whether the stream has lost its blocks and waits for new ones."""
        return not self.block_table

    @property
    def recomputing(self) -> bool:
        """Whether KV that was in the pool before is being computed again."""
        return not self.preempted and self.computed < self.known

    @property
    def prefilling(self) -> bool:
        """Whether its prompt is being computed here for the first time."""
        return self.prefill is not None and not self.recomputing

    @property
    def remaining(self) -> int:
        """Number of tokens to compute before the next one is sampled."""
        return len(self.token_ids) - self.computed

    @property
    def complete(self) -> bool:
        """Whether the stream runs: the KV of all its tokens but the newest is in the pool."""
        return not self.preempted and self.prefill is None and self.remaining == 1

    def append(self, token_id: int) -> None:
        """Add a token that was sampled."""
        self.token_ids.append(token_id)
        self.num_generated += 1

    def agreed(self) -> None:
        """Note that the newest token had been guessed: its KV is in the pool already, and another token follows."""
        self.computed += 1
        self.known = max(self.known, self.computed)
