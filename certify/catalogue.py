"""The parts of `tandem certify` in the order in which they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.errors import InvalidRequestError


@dataclass(frozen=True)
class Part:
    """One part: what it proves, and how long it may take."""

    name: str
    proves: str
    """A sentence for the report."""
    limit_s: float
    module: str
    """The module whose function `run` does it."""


PARTS = (
    Part("machine", "What this machine is, and what its GPUs reach in a copy and in a product.", 60, "certify.parts.machine"),
    Part("kernels", "Every Triton kernel computes what its formula says, and how long it takes.", 240, "certify.parts.kernels"),
    Part("steps", "How long whole steps of an 8B model take, beside the least that they need.", 150, "certify.parts.steps"),
    Part("exactness", "Which ways of computing the same tokens give the same bits.", 60, "certify.parts.exactness"),
    Part(
        "handoff",
        "KV arrives whole between two processes, and a lost peer ends no more than its lane.",
        180,
        "certify.parts.handoff",
    ),
    Part("cluster", "A cluster serves, survives the deaths of its workers, and how fast it is.", 240, "certify.parts.cluster"),
    Part("ranks", "Two ranks compute one model over NCCL, to the same tokens as one.", 90, "certify.parts.ranks"),
    Part("peer", "How long the steps of vLLM take on this machine, where it is installed.", 160, "certify.parts.peer"),
)


def chosen_parts(names: Sequence[str]) -> list[Part]:
    """Return the parts of these names in the order in which they run, all of them for no names.

    Raises InvalidRequestError if there is no part of a name.
    """
    known = [part.name for part in PARTS]
    for name in names:
        if name not in known:
            raise InvalidRequestError(f"no part {name!r:.40}: it is one of {', '.join(known)}", param="part")
    return [part for part in PARTS if not names or part.name in names]
