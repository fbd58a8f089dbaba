"""The small pieces between a link and the pipeline."""

from __future__ import annotations

import asyncio

import pytest

from protocol.errors import KvTransferError, WorkerLostError
from protocol.messages.common import Failed
from protocol.messages.decode import StreamOutput
from protocol.sampling import FinishReason, SamplingParams
from router.dispatch.journal import Arrival, Guesses, Journal, StepGuesses, Tokens
from router.dispatch.streams import OpenStreams, TokenStream

ARRIVAL = Arrival(5.0, 0.01)


def output(*token_ids: int, finish: FinishReason | None = None) -> StreamOutput:
    return StreamOutput(1, token_ids, (), finish, None)


def test_queued_outputs_come_in_one_piece_and_before_the_error() -> None:
    async def main() -> None:
        stream = TokenStream()
        stream.put(output(1), ARRIVAL)
        stream.put(output(2, 3), ARRIVAL)
        stream.fail(WorkerLostError("gone"))
        stream.fail(WorkerLostError("twice"))
        assert await stream.take() == Tokens((1, 2, 3), (), None, arrivals=(ARRIVAL, ARRIVAL))
        assert stream.ended
        with pytest.raises(WorkerLostError, match="gone"):
            await stream.take()

    asyncio.run(main())


def test_guesses_are_counted_with_the_tokens_that_they_became() -> None:
    async def main() -> None:
        stream = TokenStream()
        stream.put(StreamOutput(1, (1, 2, 3), (), None, None, drafts=4), ARRIVAL)
        assert (await stream.take()).guesses == (StepGuesses(0, drafts=4, right=2),)
        for drafted in (
            StreamOutput(1, (4,), (), None, None, drafts=3),
            output(5),
            StreamOutput(1, (6, 7), (), None, None, None, 1),
        ):
            stream.put(drafted, ARRIVAL)
        taken = await stream.take()
        assert (taken.token_ids, taken.guesses_until(4)) == ((4, 5, 6, 7), Guesses(drafts=4, right=1))
        assert [taken.guesses_until(number) for number in (2, 3)] == [Guesses(drafts=3), Guesses(drafts=4)]

    asyncio.run(main())


def test_a_stream_that_moves_is_owed_nothing_until_it_is_attached_there() -> None:
    """A worker that was idle made no step for long, and is no worse for it."""
    here, there = OpenStreams(), OpenStreams()
    stream = here.open(1)
    here.note_attached(1)
    assert here.owed_tokens
    here.close(1)
    there.adopt(2, stream)
    assert (there.owed_tokens, there.claims) == (False, {2: False})
    there.note_attached(2)
    assert (there.owed_tokens, there.claims) == (True, {2: True})


@pytest.mark.parametrize("first", [False, True])
def test_a_stream_whose_end_was_taken_is_owed_nothing(first: bool) -> None:
    """Its ticket is released a little later, and its worker may be asked meanwhile what it holds."""

    async def main() -> None:
        streams = OpenStreams()
        stream = streams.open(1)
        streams.note_attached(1)
        stream.put(output(4, finish=FinishReason.STOP), ARRIVAL)
        taken = await (stream.take_first() if first else stream.take())
        assert taken.finish_reason is FinishReason.STOP
        assert (stream.ended, streams.owed_tokens, streams.claims) == (True, False, {1: False})

    asyncio.run(main())


def test_take_waits_for_outputs_and_errors() -> None:
    async def main() -> None:
        stream = TokenStream()
        waiting = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        stream.put(output(4), ARRIVAL)
        assert (await waiting).token_ids == (4,)
        waiting = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        stream.put(StreamOutput(1, (), (), None, Failed.from_error(0, KvTransferError("aborted"))), ARRIVAL)
        with pytest.raises(KvTransferError):
            await waiting

    asyncio.run(main())


def test_an_interval_holds_tokens_back_until_there_are_enough() -> None:
    async def main() -> None:
        stream = OpenStreams(3).open(1)
        stream.put(output(1), ARRIVAL)
        assert (await stream.take_first()).token_ids == (1,), "the first token waits for no other"
        stream.put(output(2), ARRIVAL)
        assert (await stream.take()).token_ids == (2,), "nor does the first step after the prompt's"
        waiting = asyncio.create_task(stream.take())
        for token_id in (3, 4):
            await asyncio.sleep(0)
            stream.put(output(token_id), ARRIVAL)
        await asyncio.sleep(0)
        assert not waiting.done()
        stream.put(output(5), ARRIVAL)
        assert (await waiting).token_ids == (3, 4, 5)
        stream.put(output(6), ARRIVAL)
        stream.put(output(7, finish=FinishReason.LENGTH), ARRIVAL)
        assert (await stream.take()).token_ids == (6, 7), "the end comes at once"

    asyncio.run(main())


def test_what_an_interval_holds_back_comes_before_a_failure() -> None:
    async def main() -> None:
        stream = TokenStream(4)
        stream.put(output(1), ARRIVAL)
        assert (await stream.take()).token_ids == (1,), "the first of a worker says that it lives"
        waiting = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        stream.put(output(2), ARRIVAL)
        stream.fail(WorkerLostError("gone"))
        assert (await waiting).token_ids == (2,)
        with pytest.raises(WorkerLostError, match="gone"):
            await stream.take()

    asyncio.run(main())


def test_cancelled_take_can_be_taken_up_again() -> None:
    async def main() -> None:
        stream = TokenStream()
        waiting = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        stream.put(output(5), ARRIVAL)
        assert (await stream.take()).token_ids == (5,)

    asyncio.run(main())


def test_journal_is_what_is_needed_to_go_on() -> None:
    journal = Journal((7, 8), SamplingParams(seed=1, max_tokens=5), "")
    assert (journal.token_ids, journal.num_generated, journal.remaining_tokens) == ((7, 8), 0, 5)
    journal.record(Tokens((9,), (), None))
    journal.record(Tokens((10, 11), (), None))
    assert (journal.token_ids, journal.num_generated, journal.remaining_tokens) == ((7, 8, 9, 10, 11), 3, 2)
