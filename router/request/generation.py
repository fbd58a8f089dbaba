"""What is to be generated for one prompt, in the terms of the pipeline: token ids, sampling, and how answers are written."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.sampling import SamplingParams
from protocol.trace import TraceContext
from router.request.echo import Echo
from router.request.usage import Usage
from router.rules.fair_queue import ANYBODY, SchedulingClass
from router.text.tool_format import ToolFormat


@dataclass(frozen=True)
class Generation:
    """One prompt and the answers that are wanted to it, in the terms of the pipeline."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stops: tuple[str, ...]
    cache_salt: str
    """Only requests with the same salt share cached KV. It is empty if the client sent none."""
    num_choices: int
    echo: Echo | None
    """The prompt that the answer repeats before it begins; None if it repeats none."""
    prompt_cache_key: str | None = None
    """The client's name for prompts that begin alike."""
    scheduling_class: SchedulingClass = ANYBODY
    """Decides the generation's place in line."""
    tool_format: ToolFormat | None = None
    """How calls of tools are written; None if the answer can have no calls."""
    continues: bool = False
    """Whether the answer's text goes on from the prompt's, as that of a plain completion does."""
    num_dropped: int | None = None
    """Number of messages that were left out of the chat; None unless the client allowed that."""


@dataclass(frozen=True)
class RequestIdentity:
    """Which request it is, whose, and when it began."""

    request_id: str
    trace: TraceContext
    arrival: float
    """Time at which the request arrived, on `time.monotonic`."""
    tenant: str = ""
    """Empty where the cluster has no keys."""
    key_id: str | None = None
    usage: Usage = field(default_factory=Usage)
    """Takes what is computed for the request."""
