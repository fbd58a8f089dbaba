"""What `make bench` runs: a part is one script with its arguments, the question that it answers, and what it needs.

A script's arguments may hold `{peers}`, `{traces}` and `{clients}`, the folders of the options of these names, and `{url}`, the
address of a cluster that is started for the part (`serve`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

LIMIT_FACTOR = 2.0
"""A part is ended when it has taken so many times as long as it is expected to."""


class Need(Enum):
    """What a part needs beside this repository and its environment."""

    PEERS = "the peers' environment (--peer-env DIR, made by benchmarks.peers.setup)"
    TRACES = "the traces (--traces DIR, see benchmarks/lib/workloads.py)"
    CLIENTS = "a folder for other clients' environments (--client-env DIR)"
    LM_EVAL = "lm-eval, installed in lm_eval/ of --client-env DIR"
    REDIS = "redis-server"
    NAMESPACES = "network namespaces"
    GPU = "a GPU"


@dataclass(frozen=True)
class Part:
    """One part of all benchmarks."""

    name: str
    question: str
    """What it answers, for the pages of results."""
    minutes: float
    """Minutes that it is expected to take on two cores."""
    result: str
    """Name of the results without an ending. Those of a processor have the name of its operators behind it."""
    exercises: tuple[str, ...]
    """Folders and files of the product that the script exercises: results are older than the code once one has changed."""
    module: str | None = None
    """The module that does it; None for what is run by hand."""
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    """Names and values of environment variables."""
    needs: tuple[Need, ...] = ()
    serve: tuple[str, ...] | None = None
    """Flags of the cluster that is started for the part and ended after it; None for no cluster."""
    per_processor: bool = False
    """Whether each kind of processor has results of its own."""
    keeps_state: bool = False
    """Whether the script has `--state FILE`: a run that was cut short goes on there."""
    shown: str = ""
    """The command by hand, if it is another one than the module and its arguments say."""

    @property
    def limit_s(self) -> float:
        """Seconds after which the part is ended."""
        return self.minutes * 60 * LIMIT_FACTOR

    @property
    def command(self) -> str:
        """The command for people, with DIR and URL for folders and addresses."""
        if self.shown:
            return self.shown
        words = " ".join(self.arguments)
        for placeholder, name in (("{peers}", "DIR"), ("{traces}", "DIR"), ("{url}", "URL"), ("{clients}", "DIR")):
            words = words.replace(placeholder, name)
        return f"python -m {self.module} {words}".rstrip()
