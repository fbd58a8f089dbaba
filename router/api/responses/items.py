"""Builds the output items of a response while they grow: a message, or a call of a function. Pure.

open ──► add, as often as something comes ──► close     each gives the events that tell of it, still without numbers
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from router.api.large.encoding import Entries
from router.api.shapes import Json


class PartialMessage:
    """A message item that is still growing. It has one part, which is text."""

    def __init__(self, item_id: str, output_index: int) -> None:
        self._item_id = item_id
        self._output_index = output_index
        self._pieces: list[str] = []
        self._logprobs: list[Json] = []

    def open(self) -> list[Json]:
        """Return the events that begin the item."""
        item = self._item("in_progress", [])
        added: Json = {"type": "response.output_item.added", "output_index": self._output_index, "item": item}
        return [added, self._event("response.content_part.added", part=self._part())]

    def add(self, text: str, logprobs: Sequence[Json]) -> list[Json]:
        """Add text with the logprobs of its tokens, and return the event that tells of it."""
        self._pieces.append(text)
        self._logprobs += logprobs
        return [self._event("response.output_text.delta", delta=text, logprobs=logprobs)]

    def close(self, status: str) -> list[Json]:
        """Return the events that end the item. `status` is `completed` or `incomplete`."""
        part = self._part()
        done: Json = {"type": "response.output_item.done", "output_index": self._output_index, "item": self.item(status)}
        return [
            self._event("response.output_text.done", text=part["text"], logprobs=part["logprobs"]),
            self._event("response.content_part.done", part=part),
            done,
        ]

    def item(self, status: str) -> Json:
        """Return the item as it is now, as part of the response's output."""
        return self._item(status, [self._part()])

    def _item(self, status: str, content: Sequence[Json]) -> Json:
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _part(self) -> Json:
        text, logprobs = "".join(self._pieces), Entries(self._logprobs)
        return {"type": "output_text", "annotations": [], "logprobs": logprobs, "text": text}

    def _event(self, kind: str, **fields: object) -> Json:
        where = {"item_id": self._item_id, "output_index": self._output_index, "content_index": 0}
        return {"type": kind, **where, **fields}


class PartialCall:
    """A function call item that is still growing: a call of one of the client's functions."""

    def __init__(self, item_id: str, output_index: int, call_id: str, name: str) -> None:
        self._item_id = item_id
        self._output_index = output_index
        self._call_id = call_id
        self._name = name
        self._pieces: list[str] = []

    def open(self) -> list[Json]:
        """Return the event that begins the item."""
        return [{"type": "response.output_item.added", "output_index": self._output_index, "item": self.item("in_progress")}]

    def add(self, arguments: str) -> list[Json]:
        """Add text of the arguments, and return the event that tells of it."""
        self._pieces.append(arguments)
        return [self._event("response.function_call_arguments.delta", delta=arguments)]

    def close(self, status: str) -> list[Json]:
        """Return the events that end the item. `status` is `completed` or `incomplete`."""
        item = self.item(status)
        done: Json = {"type": "response.output_item.done", "output_index": self._output_index, "item": item}
        return [self._event("response.function_call_arguments.done", name=self._name, arguments=item["arguments"]), done]

    def item(self, status: str) -> Json:
        """Return the item as it is now, as part of the response's output."""
        return {
            "id": self._item_id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._pieces),
        }

    def is_whole(self) -> bool:
        """Whether the arguments of the call are a whole JSON object, so that a client can run it."""
        try:
            return isinstance(json.loads("".join(self._pieces)), dict)
        except (ValueError, RecursionError):
            return False

    def _event(self, kind: str, **fields: object) -> Json:
        return {"type": kind, "item_id": self._item_id, "output_index": self._output_index, **fields}
