"""Logs of every process: one line per event on stderr, `time level component logger: message key=value ...`.

No prompt, no answer and no token of a client ever goes into a log; ids, lengths, times and error codes do.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar

from protocol.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
_FIELDS = "fields"
_component: ContextVar[str | None] = ContextVar("component", default=None)


def setup_logging(component: str, level: str = "info") -> None:
    """Send this process's logs to stderr in Tandem's format. Called once, by the process's entry point.

    Raises ConfigError if `level` is not one of LEVELS.
    """
    if level not in LEVELS:
        raise ConfigError(f"no log level {level!r}; use one of {', '.join(LEVELS)}", param="log_level")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(component))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # A full disk costs lines, and nothing else. In a router, stderr is a log, too: complaints of lost lines would come back
    # here without end.
    logging.raiseExceptions = False


def name_component(component: str) -> None:
    """Name the component in the logs of this task or thread, and of the tasks that it makes, where a process has several."""
    _component.set(component)


def fields(**values: object) -> Mapping[str, object]:
    """Keys and values for a line: `log.info("done", extra=fields(tokens=3))`."""
    return {_FIELDS: values}


class LineFormatter(logging.Formatter):
    """Formats every record as one line, whatever the message holds, an exception's traceback included."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of text."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        component = _component.get() or self._component
        parts = [f"{stamp}.{int(record.msecs):03d}Z {record.levelname} {component} {record.name}: {record.getMessage()}"]
        extra: Mapping[str, object] = getattr(record, _FIELDS, {})
        parts += [f"{key}={_value(value)}" for key, value in extra.items()]
        if record.exc_info:
            parts.append(f"traceback={self.formatException(record.exc_info)}")
        return " ".join(parts).replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n")


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if text and not set(text) & set(' "=') else '"' + text.replace('"', "'") + '"'
