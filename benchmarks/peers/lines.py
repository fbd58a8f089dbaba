"""The life of a measured process, the same for every system. Needs only the standard library, and torch where that is there.

    start ──► {"ready": version} ──► [{"prefill": [...], "decode": [...]} ──► {"prefill 256": tokens/s, ...}] … ──► end of input

One JSON object per line, requests on stdin, answers on what was stdout; anything that a library prints goes to stderr instead.
Between two requests a process waits for input; the driver stops it meanwhile, so that no spinning thread takes a core.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

REPEATS = 3
"""Of each prefill, in one round."""
DECODE_STEPS = 16
"""Steps that are timed together."""
_PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>."""


@dataclass(frozen=True)
class Cases:
    """What to measure in one round."""

    prefill: list[int]
    """Tokens of one prompt."""
    decode: list[tuple[int, int]]
    """Sequences, tokens of context of each."""


Measure = Callable[[Cases], dict[str, float]]


def fastest_dtype() -> str:
    """Return the type that torch computes in fastest on this processor: bfloat16 where oneDNN has such products.

    Without them, torch takes minutes for a prompt in bfloat16. Imports torch.
    """
    import torch

    return "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"


def prefill_name(length: int) -> str:
    return f"prefill {length}"


def decode_name(size: int, context: int) -> str:
    return f"decode {size} x {context}"


def claim_stdout() -> TextIO:
    """The channel to the driver. From here on file descriptor 1 is stderr, and this process dies when the driver does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return channel


def serve(channel: TextIO, version: str, measure: Measure) -> None:
    """Answer requests until the input ends."""
    print(json.dumps({"ready": version}), file=channel)
    for line in sys.stdin:
        request = json.loads(line)
        cases = Cases(request["prefill"], [(size, context) for size, context in request["decode"]])
        print(json.dumps(measure(cases)), file=channel)


def median_s(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Wall seconds of one call, after one that is not counted."""
    work()
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
