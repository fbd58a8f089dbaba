"""What a role is to the worker that has it, and what it says of itself."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from protocol.audit import PromptRow, SendRow, TicketRow
from protocol.endpoint import Handler
from protocol.messages.load import NOTHING_BROUGHT, Brought, DecodeLoad, PrefillLoad
from protocol.messages.workers import Role


@dataclass(frozen=True, kw_only=True)
class RoleLoad:
    """A role's part of a load report. The fields are those of `protocol.messages.load.LoadReport`."""

    running: int
    waiting: int
    queued_tokens: int
    tickets: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    brought: Brought = NOTHING_BROUGHT
    failed_fetches: int = 0
    prefill: PrefillLoad | None = None
    decode: DecodeLoad | None = None


@dataclass(frozen=True, kw_only=True)
class RoleBooks:
    """A role's part of the books that an audit asks for."""

    tables: Sequence[Sequence[int]]
    """The blocks of everything that the role holds some for."""
    tickets: tuple[TicketRow, ...] = ()
    sends: tuple[SendRow, ...] = ()
    prompts: tuple[PromptRow, ...] = ()
    problems: tuple[str, ...] = ()


class RoleWork(Protocol):
    """The work of one role at one worker. The worker asks all of its roles, whichever of them it has now."""

    role: Role

    @property
    def token_s(self) -> float:
        """Seconds that computing a token of a prompt took lately; 0 if that is not known."""

    def handlers(self) -> Mapping[type[Any], Handler]:
        """Who answers which message of the role's own."""

    def loops(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Return the coroutines that run as long as the worker."""

    def role_load(self) -> RoleLoad:
        """The role's part of the worker's load at this moment."""

    def role_books(self, asker: bytes) -> RoleBooks:
        """The role's part of the worker's books at this moment. `asker` is the wire identity of the router that asks."""

    @property
    def held_blocks(self) -> set[int]:
        """KV blocks that the role holds."""

    def growth(self, shared: Sequence[bytes] = ()) -> int | None:
        """KV blocks that what is under way will soon want, if others take the cached blocks of `shared` as well. None: it waits
        for some, so that nothing new should take any.
        """

    @property
    def idle(self) -> bool:
        """Nothing of the role's is under way."""

    def drain(self) -> None:
        """Take nothing new. What is there is done."""

    def leave(self) -> None:
        """The worker has another role from now on: give back what has not begun."""

    def peer_lost(self, peer: bytes) -> None:
        """Give back what this peer has here: its connection is gone."""

    def beat(self) -> None:
        """Give back what nobody has renewed. Called once in each heartbeat."""

    def changed(self) -> None:
        """Look again whether there is something to do: blocks have come free, or the load is another."""

    async def close(self) -> None:
        """End what is under way. The pairs by which KV leaves are closed by then."""
