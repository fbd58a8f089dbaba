"""What gloo lacks for a moment is a failed connection, and no error that would end its worker."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import pytest

from kv_transfer.lanes import view_of
from kv_transfer.transport import LackError
from kv_transfer.transports.gloo import GlooTransport
from tests.unit.kv_transfer.two_ends import pool


@contextmanager
def no_free_descriptor() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def never(_: bytes) -> NoReturn:
    raise AssertionError("there is no address to offer")


def test_without_a_free_descriptor_neither_end_connects() -> None:
    transport, view = GlooTransport("127.0.0.1"), view_of(pool().layers())
    with no_free_descriptor():
        with pytest.raises(LackError, match="gloo could not listen"):
            transport.connect_sender(never, view, 1)
        with pytest.raises(LackError, match="gloo could not listen"):
            transport.connect_receiver(b"offer", never, view, 1)
