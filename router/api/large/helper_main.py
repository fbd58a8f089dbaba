"""The helper process: reads bodies from its standard input, and answers what is wrong with each.

    ready ──► request: kind, body ──► answer: a JSON object of what is wrong, or nothing ──► request ... ──► end of input

It is the child of one router (`router.api.large.helper`), and ends when its input does: whatever ends the router ends it. A
body that takes more than JOB_S, or more memory than _MAX_MEMORY, ends the process too; the router starts another.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from typing import BinaryIO

from protocol.errors import InvalidRequestError
from router.api.body import Body, parse_body
from router.api.chat.body import ChatBody
from router.api.completions.body import CompletionBody
from router.api.responses.body import ResponsesBody
from router.api.tools.bodies import (
    AutoscaleBody,
    CacheBody,
    DetokenizeBody,
    DrainBody,
    FlipBody,
    RolloutBody,
    ScaleBody,
    TokenizeBody,
)

REQUEST_HEAD = struct.Struct(">II")
"""Bytes of the kind's name, bytes of the body; both follow."""
ANSWER_HEAD = struct.Struct(">I")
"""Bytes of the answer, which follows. A first answer of 0 bytes says that the process is ready."""
JOB_S = 1.5
"""Seconds of a processor's time that one body may take."""
WALL_S = 5.0
"""Seconds that it may take where others keep the processors busy."""
_MAX_MEMORY = 2 * 2**30
_OPERATORS = (AutoscaleBody, CacheBody, DrainBody, FlipBody, RolloutBody, ScaleBody)
KINDS: dict[str, type[Body]] = {
    kind.__name__: kind for kind in (ChatBody, CompletionBody, ResponsesBody, TokenizeBody, DetokenizeBody, *_OPERATORS)
}
"""All bodies that requests may have, by name."""


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer one request after the other, until there are no more."""
    while len(head := requests.read(REQUEST_HEAD.size)) == REQUEST_HEAD.size:
        kind_size, size = REQUEST_HEAD.unpack(head)
        kind = requests.read(kind_size).decode()
        data = requests.read(size)
        if len(data) < size:
            return
        # The signals' default is to end the process, also in the middle of C code.
        signal.setitimer(signal.ITIMER_PROF, JOB_S)
        signal.setitimer(signal.ITIMER_REAL, WALL_S)
        answer = problem(KINDS[kind], data)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(ANSWER_HEAD.pack(len(answer)) + answer)
        answers.flush()


def problem(kind: type[Body], data: bytes) -> bytes:
    """Return what is wrong with a body, as the JSON of InvalidRequestError's arguments; nothing if nothing is."""
    try:
        parse_body(kind, data)
    except InvalidRequestError as error:
        return json.dumps({"message": error.message, "param": error.param}).encode()
    return b""


def main() -> None:
    """Run until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the router decides when it ends
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout.buffer.write(ANSWER_HEAD.pack(0))
    sys.stdout.buffer.flush()
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
