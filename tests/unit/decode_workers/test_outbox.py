"""Frames of tokens: what is sent can be read."""

from __future__ import annotations

import pytest

from configs.speculation.config import MAX_DRAFTS
from decode_workers.outbox import Outbox
from protocol.codec import decode, encode
from protocol.messages.decode import Prefilled, StreamOutput, TokenFrame
from protocol.sampling import PromptLogprobs, TokenLogprobs, TokenProb


@pytest.mark.parametrize(("num_streams", "num_tokens"), [(1, 1), (256, 10), (3000, 1), (90, 1 + MAX_DRAFTS)])
def test_a_router_can_read_what_many_streams_with_logprobs_made(num_streams: int, num_tokens: int) -> None:
    """As many logprobs as a client may ask for, also where all drafts were right, and behind prompts computed here."""
    logprobs = TokenLogprobs(-1.0, tuple(TokenProb(token_id, -1.0) for token_id in range(20)))
    read: list[StreamOutput] = []

    def send(owner: bytes, message: object) -> None:
        assert owner == b"r"
        frame = decode(encode(message))
        assert isinstance(frame, TokenFrame)
        assert frame.step_s == 0.5
        read.extend(frame.outputs)

    outbox = Outbox(send)
    said = ((7,) * num_tokens, (logprobs,) * num_tokens, None, None)
    prefilled = Prefilled(1.0, 0, PromptLogprobs(b"", b"", b""))
    made = [StreamOutput(ticket, *said, prefilled) for ticket in range(num_streams)]
    for output in made:
        outbox.put(b"r", output)
    outbox.flush(0.5)
    assert [output.ticket_id for output in read] == list(range(num_streams))
    assert read[-1] == made[-1]
