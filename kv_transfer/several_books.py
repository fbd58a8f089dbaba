"""Arrivals that go into several sets of books: tickets and loans of one worker, whose ids come from one counter."""

from __future__ import annotations

from collections.abc import Mapping

from kv_transfer.receiver import Destination, TransferBooks


class SeveralBooks:
    """Several books as one `TransferBooks` (`kv_transfer.receiver`). Each transfer is known to one of the books alone."""

    def __init__(self) -> None:
        self._books: list[TransferBooks] = []
        self._begun: dict[int, tuple[TransferBooks, int]] = {}
        """By ticket that pushes write into: its books, and how many pushes."""

    def add(self, books: TransferBooks) -> None:
        """Have transfers go into these books as well."""
        self._books.append(books)

    @property
    def pushes_in_flight(self) -> int:
        """Number of pushes under way, over all books."""
        return sum(count for _, count in self._begun.values())

    def begin_push(
        self, source: bytes, ticket_id: int, transfer_id: int, start: int, num_tokens: int, added: tuple[int, ...]
    ) -> Destination | None:
        """Open a push in the books that know the transfer. Returns None if there are none, or if they refuse it."""
        for books in self._books:
            destination = books.begin_push(source, ticket_id, transfer_id, start, num_tokens, added)
            if destination is not None:
                _, count = self._begun.get(ticket_id, (books, 0))
                self._begun[ticket_id] = books, count + 1
                return destination
        return None

    def end_push(self, ticket_id: int, num_tokens: int, ok: bool) -> None:
        """End a push in the books where it began."""
        books, count = self._begun.pop(ticket_id)
        if count > 1:
            self._begun[ticket_id] = books, count - 1
        books.end_push(ticket_id, num_tokens, ok)

    def fingerprints(self, ticket_id: int, transfer_id: int) -> Mapping[int, bytes] | None:
        """Fingerprints of what has arrived for this transfer, by lane. None if it is gone."""
        found = (books.fingerprints(ticket_id, transfer_id) for books in self._books)
        return next((each for each in found if each is not None), None)

    def commit(self, ticket_id: int, transfer_id: int, num_tokens: int) -> bool:
        """Close a transfer whose fingerprints were checked. False if something is missing or it is gone."""
        return any(books.commit(ticket_id, transfer_id, num_tokens) for books in self._books)

    def abort_transfer(self, ticket_id: int, transfer_id: int) -> None:
        """Give up a transfer. Without effect if it was committed before."""
        for books in self._books:
            books.abort_transfer(ticket_id, transfer_id)
