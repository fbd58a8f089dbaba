"""A request in another endpoint's words: what is refused there is told to the client in its own."""

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
    """A body as a chat. `names`: paths in the chat (or beginnings of paths), and what they are called in the client's body."""

    values: Json = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def chat(self) -> ChatBody:
        """Raises InvalidRequestError, in the chat's words."""
        return check_body(ChatBody, self.values)

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """What is refused inside is said about the client's own fields."""
        try:
            yield
        except TandemError as error:
            message = _PATH.sub(lambda found: self._own(found[0]), error.message)
            param = None if error.param is None else self._own(error.param)
            raise type(error)(message, param=param, retry_after_s=error.retry_after_s) from None

    async def undone_for(self, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        """The same pieces; so is what ends them early."""
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
