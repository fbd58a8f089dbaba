"""Bodies of JSON that cost a server far more than their bytes, for the tests of what they may cost."""

from __future__ import annotations

from collections.abc import Callable

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
_MODEL = b'{"model":"smollm2",'


def _filled(size: int, head: bytes, element: bytes, tail: bytes) -> bytes:
    """`head`, as many elements as fit, with commas between them, and `tail`: `size` bytes or a few less."""
    room = size - len(head) - len(tail)
    return head + b",".join([element] * (room // (len(element) + 1))) + tail


def _counted(size: int, head: bytes, spell: Callable[[int], bytes], tail: bytes) -> bytes:
    """The same of elements that differ."""
    pieces: list[bytes] = []
    left = size - len(head) - len(tail)
    while left > 0:
        pieces.append(spell(len(pieces)))
        left -= len(pieces[-1]) + 1
    return head + b",".join(pieces[:-1]) + tail


def _deep(size: int) -> bytes:
    half = (size - 40) // 2
    return _MODEL + b'"prompt":' + b"[" * half + b"]" * half + b"}"


_MESSAGES = _MODEL + b'"messages":['
_TOOLS = _MESSAGES + b'{"role":"user","content":"a"}],"tools":[{"type":"function","function":{"name":"f","parameters":'
_PROPERTIES = _TOOLS + b'{"type":"object","properties":{'
_PARTS = b'{"role":"user","content":[' + b",".join([b'{"type":"text","text":"aaaa"}'] * 5) + b"]}"
_CALLS = _MESSAGES + b'{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f","arguments":"{\\"a\\":['

SHAPES: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "empty strings": (PLAIN, lambda size: _filled(size, _MODEL + b'"prompt":[', b'""', b"]}")),
    "deep nesting": (PLAIN, _deep),
    "messages": (CHAT, lambda size: _filled(size, _MESSAGES, b'{"role":"user","content":""}', b"]}")),
    "properties": (CHAT, lambda size: _counted(size, _PROPERTIES, lambda i: b'"p%d":{"type":"string"}' % i, b"}}}}]}")),
    "huge numbers": (PLAIN, lambda size: _filled(size, _MODEL + b'"prompt":[', b"9" * 4000, b"]}")),
    "unknown fields": (PLAIN, lambda size: _counted(size, _MODEL, lambda i: b'"k%d":0' % i, b"}")),
    "escapes": (CHAT, lambda size: _filled(size, _MESSAGES + b'{"role":"user","content":"', b'\\n\\"\\\\\\u00e9', b'"}]}')),
    "same fields": (PLAIN, lambda size: _filled(size, _MODEL, b'"prompt":""', b"}")),
    "stop strings": (PLAIN, lambda size: _filled(size, _MODEL + b'"prompt":"a","stop":[', b'"a"', b"]}")),
    "prompts of a token": (PLAIN, lambda size: _filled(size, _MODEL + b'"prompt":[', b"[1]", b"]}")),
    "tokens": (PLAIN, lambda size: _filled(size, _MODEL + b'"prompt":[', b"1", b"]}")),
    "a word without end": (CHAT, lambda size: _MESSAGES + b'{"role":"user","content":"' + b"qz" * (size // 2 - 40) + b'"}]}'),
    "arguments": (CHAT, lambda size: _filled(size, _CALLS, b"{}", b']}"}}]}]}')),
    "just under the bounds": (
        CHAT,
        lambda size: _filled(min(size, 2600 * (len(_PARTS) + 1)), _MESSAGES, _PARTS, b"]}"),
    ),
}
"""By name: the path, and the body of about so many bytes."""
EIGHT = (
    "empty strings",
    "deep nesting",
    "messages",
    "properties",
    "huge numbers",
    "unknown fields",
    "escapes",
    "tokens",
)
"""The shapes that one and the same attack has in every size."""
