"""A paced worker's link: bytes go after the time that they would take."""

from __future__ import annotations

import time
from unittest.mock import Mock, call

import pytest

from configs.paced.profile import PACED_LAYERS, load_paced_profile
from kv_transfer.plan import SlotRun
from kv_transfer.pool_view import PoolView, Slots
from kv_transfer.transport import SendChannel, SendTransport, TransportError
from kv_transfer.transports.paced import Link, at_pace

SLOW = load_paced_profile("h200-8b").model_copy(update={"kv_token_bytes": 1000, "link_bytes_per_s": 1e6})
"""A token takes 1 ms."""
LAYERS = range(PACED_LAYERS)


def connected(deadline_s: float) -> tuple[SendChannel, Mock]:
    inner, channel = Mock(spec=SendTransport), Mock(spec=SendChannel)
    inner.name = "shared_memory"
    inner.connect_sender.return_value = channel
    (paced,) = at_pace([inner], SLOW)
    assert paced.name == "shared_memory"
    sending = paced.connect_sender(Mock(), Mock(spec=PoolView), deadline_s)
    return sending, channel


def test_what_is_sent_together_waits_for_each_other() -> None:
    link = Link(SLOW)
    first, second = link.reserve(100 * PACED_LAYERS, 5), link.reserve(50 * PACED_LAYERS, 5)
    assert first == pytest.approx(0.1, abs=0.01)
    assert second == pytest.approx(0.15, abs=0.01)


def test_a_push_goes_after_its_time_and_unchanged() -> None:
    sending, channel = connected(5.0)
    slots, began = Slots([SlotRun(0, 60), SlotRun(80, 20)]), time.monotonic()
    sending.send(LAYERS, slots)
    assert time.monotonic() - began >= 0.08
    sending.flush()
    sending.close()
    assert channel.mock_calls == [call.send(LAYERS, slots), call.flush(), call.close()]


def test_a_link_that_is_taken_for_too_long_breaks_the_lane() -> None:
    sending, channel = connected(0.05)
    with pytest.raises(TransportError, match="the link is taken"):
        sending.send(LAYERS, Slots([SlotRun(0, 100)]))
    channel.send.assert_not_called()
    sending.send(LAYERS, Slots([SlotRun(0, 10)]))
    channel.send.assert_called_once()
