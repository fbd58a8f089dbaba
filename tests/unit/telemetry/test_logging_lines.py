"""Logs are one line per event, whatever they hold."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from telemetry.logging import fields, setup_logging


@pytest.fixture(autouse=True)
def _restore_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, complains = root.handlers, root.level, logging.raiseExceptions
    yield
    logging.raiseExceptions = complains
    root.handlers = handlers
    root.setLevel(level)


def test_line_has_time_level_component_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("decode-1", "info")
    logging.getLogger("some.part").info("moved %d blocks", 3, extra=fields(worker="p 1", seconds=0.25, why='a "b"', none=""))
    logging.getLogger("some.part").debug("not shown")
    line = capsys.readouterr().err
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO decode-1 some\.part: moved 3 blocks "
        r"worker=\"p 1\" seconds=0\.25 why=\"a 'b'\" none=\"\"\n",
        line,
    )


def test_newlines_and_tracebacks_stay_on_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("router")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("x").exception("bad\r\nthing")
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert "ValueError: two\\nlines" in text
    assert "bad\\r\\nthing" in text


def test_unknown_level_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="debug, info, warning, error"):
        setup_logging("router", "loud")


def test_logs_go_to_stderr() -> None:
    setup_logging("router")
    [handler] = logging.getLogger().handlers
    assert isinstance(handler, logging.StreamHandler)
    assert handler.stream is sys.stderr


def test_a_full_disk_costs_lines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where stderr is itself a log on that disk, as in a router: complaints must not go in circles."""
    served = logging.Logger("served")

    class Stderr:
        def write(self, text: str) -> int:
            served.info(text)
            return len(text)

        def flush(self) -> None:
            pass

    full = Path("/dev/full").open("w")  # noqa: SIM115 - it can't be closed without an error
    served.addHandler(logging.StreamHandler(full))
    monkeypatch.setattr(sys, "stderr", Stderr())
    setup_logging("router")
    logging.getLogger("some.part").info("nobody reads this")
    with suppress(OSError):
        full.close()
