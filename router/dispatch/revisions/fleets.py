"""The workers of one revision that can start on a request now, by role.

Outside of a rollout there is one fleet. During one there are two, and no pair of workers is of both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.messages.workers import Role
from router.dispatch.links import WorkerLink
from router.rules.ranking import DecodeRanking, PrefillRanking


@dataclass
class Ready:
    """The workers of one role that can start on a request now, with the sizes of their KV pools in blocks, if known."""

    ranking: PrefillRanking | DecodeRanking
    links: dict[str, WorkerLink] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def put(self, link: WorkerLink) -> None:
        """Take over what is known of a worker now."""
        worker_id = link.ref.worker_id
        self.links[worker_id] = link
        self.ranking.put(link.load())
        if link.report is not None:
            self.sizes[worker_id] = link.report.total_blocks

    def discard(self, link: WorkerLink | None) -> None:
        """Forget this link, for its worker can't start on requests. A link to a later life of the same worker stays."""
        if link is not None and self.links.get(link.ref.worker_id) is link:
            worker_id = link.ref.worker_id
            del self.links[worker_id]
            self.sizes.pop(worker_id, None)
            self.ranking.discard(worker_id)


class Fleet:
    """The ready workers of one revision, in the order in which they should be chosen."""

    def __init__(self) -> None:
        self.prefills, self.decodes = PrefillRanking(), DecodeRanking()
        self._ready = {Role.PREFILL: Ready(self.prefills), Role.DECODE: Ready(self.decodes)}

    def of(self, role: Role) -> Ready:
        """Return the ready workers of one role."""
        return self._ready[role]

    @property
    def is_empty(self) -> bool:
        """Whether no worker is ready."""
        return not any(ready.links for ready in self._ready.values())
