"""Where the time of one request went. Stamps are `time.monotonic()` of the router's process, in seconds.

arrival ─► admitted ─► first token ─► finish
          (pair chosen,  (queue and
           blocks held)   prefill of the worker are inside, as it reported them)
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class RequestTimes:
    """Filled by the pipeline as the request goes on; None is a stage that was not reached."""

    arrival: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    first_token: float | None = None
    finish: float | None = None
    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    resumes: int = 0

    def summary(self) -> dict[str, float]:
        """Seconds of every stage that was reached, for the log line of the request."""
        spans = {
            "wait_s": _span(self.arrival, self.admitted),
            "ttft_s": _span(self.arrival, self.first_token),
            "decode_s": _span(self.first_token, self.finish),
            "total_s": _span(self.arrival, self.finish),
        }
        known = {name: span for name, span in spans.items() if span is not None}
        if self.first_token is not None:
            known |= {"prefill_queue_s": self.prefill_queue_s, "prefill_s": self.prefill_s}
        return known | {"resumes": self.resumes}


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
