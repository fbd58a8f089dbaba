"""Which transports a configuration gives a worker."""

from __future__ import annotations

import pytest

from configs.schema import TransportName
from kv_transfer.choice import receiving_transports, sending_transports
from protocol.errors import ConfigError

FD = 7


@pytest.mark.parametrize(
    ("wanted", "names"),
    [("auto", ["shared_memory", "gloo"]), ("shared_memory", ["shared_memory"]), ("gloo", ["gloo"])],
)
def test_both_sides_have_what_is_wanted_the_best_first(wanted: TransportName, names: list[str]) -> None:
    assert [transport.name for transport in sending_transports(wanted, "127.0.0.1", FD)] == names
    assert [transport.name for transport in receiving_transports(wanted, "127.0.0.1")] == names


def test_a_pool_that_is_not_shared_leaves_gloo() -> None:
    assert [transport.name for transport in sending_transports("auto", "127.0.0.1", None)] == ["gloo"]
    with pytest.raises(ConfigError, match="can't be shared") as caught:
        sending_transports("shared_memory", "127.0.0.1", None)
    assert caught.value.param == "transport"
