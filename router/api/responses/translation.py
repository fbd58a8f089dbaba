"""Translates a request into a chat, and what is refused of the chat back into the client's own words."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field

from protocol.errors import TandemError
from router.api.body import check_body
from router.api.chat.body import ChatBody
from router.api.shapes import Json
from router.request.answer import Delta

_PATH = re.compile(r"(?<=`)[a-z_0-9.]+(?=`)|\bmax_tokens\b")
"""Where messages name fields."""


@dataclass
class Translation:
    """A client's body as the body of a chat."""

    values: Json = field(default_factory=dict)
    """The fields of the chat's body."""
    names: dict[str, str] = field(default_factory=dict)
    """Paths in the client's body by paths, or beginnings of paths, in the chat's body."""

    def chat(self) -> ChatBody:
        """Return the checked body of the chat. Raises InvalidRequestError, which names fields of the chat."""
        return check_body(ChatBody, self.values)

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Make every TandemError that is raised inside name the client's own fields."""
        try:
            yield
        except TandemError as error:
            message = _PATH.sub(lambda found: self._own(found[0]), error.message)
            param = None if error.param is None else self._own(error.param)
            raise type(error)(message, param=param, retry_after_s=error.retry_after_s) from None

    async def undone_for(self, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        """Yield the same pieces, and make a TandemError that ends them name the client's own fields."""
        with self.undone():
            async with contextlib.aclosing(deltas):
                async for delta in deltas:
                    yield delta

    def _own(self, path: str) -> str:
        parts = path.split(".")
        for size in range(len(parts), 0, -1):
            own = self.names.get(".".join(parts[:size]))
            if own is not None:
                return ".".join((own, *parts[size:]))
        return path
