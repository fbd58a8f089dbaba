"""Draws who sends what to whom when something fails: docs/resumption.svg and docs/reconnection.svg.

    python docs/sequences.py

Time runs downwards. Each part has a line, which ends with a cross where the part dies.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
ROW, TOP, SIDE = 36, 74, 120
INK, QUIET, LINE = "#1f2328", "#59636e", "#8c959f"
MESSAGE, KV, DEATH = "#0969da", "#bc4c00", "#cf222e"


@dataclass(frozen=True)
class Arrow:
    """A message, or KV, from one part to another. Parts are numbered from the left, from 0."""

    begin: int
    end: int
    text: str
    colour: str = MESSAGE


@dataclass(frozen=True)
class Note:
    """What a part does by itself."""

    part: int
    text: str


@dataclass(frozen=True)
class Dies:
    part: int
    text: str


Row = Arrow | Note | Dies


@dataclass(frozen=True)
class Sequence:
    title: str
    parts: tuple[str, ...]
    rows: tuple[Row, ...]
    gap: int = 230
    """Pixels between the lines of two parts."""


RESUMPTION = Sequence(
    "A decode worker dies, and the stream goes on",
    ("client", "router", "decode A", "decode B"),
    (
        Arrow(2, 1, "tokens 1 to 40"),
        Arrow(1, 0, "their text"),
        Arrow(2, 3, "copy of the KV of full blocks", KV),
        Arrow(2, 1, "tokens 41 to 52"),
        Arrow(1, 0, "their text"),
        Dies(2, "killed: its KV is gone"),
        Note(1, "the journal has prompt and tokens 1 to 52"),
        Arrow(1, 3, "Reserve(prompt, tokens 1 to 52)"),
        Arrow(3, 1, "Ticket: the copied blocks are here"),
        Arrow(1, 3, "Attach"),
        Note(3, "computes what is missing"),
        Arrow(3, 1, "tokens 53, 54, …"),
        Arrow(1, 0, "the text goes on"),
    ),
)
RECONNECTION = Sequence(
    "A router dies, and the client comes back to its stream",
    ("client", "router A", "records", "router B"),
    (
        Arrow(0, 1, "stream, resumable"),
        Arrow(1, 2, "request, pieces 1 to 30"),
        Arrow(1, 0, "events 1 to 30, each with an id"),
        Dies(1, "killed: the connection breaks"),
        Arrow(0, 3, "the same request, Last-Event-ID: 27"),
        Arrow(3, 2, "record?"),
        Arrow(2, 3, "request, pieces 1 to 30"),
        Arrow(3, 0, "events 28 to 30"),
        Note(3, "has the rest of the answer computed"),
        Arrow(3, 0, "events 31, 32, …"),
    ),
)
PICTURES = {"resumption.svg": RESUMPTION, "reconnection.svg": RECONNECTION}
"""File name to what it shows."""


def _x(sequence: Sequence, part: int) -> int:
    return SIDE + part * sequence.gap


def _lifeline(sequence: Sequence, part: int, bottom: int) -> str:
    ends = [index for index, row in enumerate(sequence.rows) if isinstance(row, Dies) and row.part == part]
    end = TOP + ROW * ends[0] + ROW // 2 if ends else bottom
    x, name = _x(sequence, part), escape(sequence.parts[part])
    return (
        f'<rect x="{x - 70}" y="38" width="140" height="30" rx="6" fill="#ddf4ff" stroke="{LINE}"/>'
        f'<text x="{x}" y="58" class="title">{name}</text>'
        f'<line x1="{x}" y1="68" x2="{x}" y2="{end}" stroke="{LINE}" stroke-width="1.5"/>'
    )


def _row(sequence: Sequence, row: Row, y: int) -> str:
    if isinstance(row, Note):
        last = row.part == len(sequence.parts) - 1
        x, anchor = _x(sequence, row.part) + (-10 if last else 10), "end" if last else "start"
        return f'<text x="{x}" y="{y + 4}" class="note" text-anchor="{anchor}">{escape(row.text)}</text>'
    if isinstance(row, Dies):
        x = _x(sequence, row.part)
        cross = (
            f'<path d="M{x - 8} {y - 8} L{x + 8} {y + 8} M{x + 8} {y - 8} L{x - 8} {y + 8}" stroke="{DEATH}" stroke-width="3"/>'
        )
        return f'{cross}<text x="{x + 16}" y="{y + 4}" class="note" fill="{DEATH}">{escape(row.text)}</text>'
    begin, end = _x(sequence, row.begin), _x(sequence, row.end)
    tip = end - 9 if end > begin else end + 9
    head = f'<path d="M{end} {y} L{tip} {y - 5} L{tip} {y + 5} Z" fill="{row.colour}"/>'
    line = f'<line x1="{begin}" y1="{y}" x2="{tip}" y2="{y}" stroke="{row.colour}" stroke-width="2"/>'
    return f'{line}{head}<text x="{(begin + end) // 2}" y="{y - 6}" class="label">{escape(row.text)}</text>'


def draw(sequence: Sequence) -> str:
    """Return the picture as SVG."""
    bottom = TOP + ROW * len(sequence.rows) + 12
    width = 2 * SIDE + sequence.gap * (len(sequence.parts) - 1)
    lines = [_lifeline(sequence, part, bottom) for part in range(len(sequence.parts))]
    rows = [_row(sequence, row, TOP + ROW * index + ROW // 2 + 4) for index, row in enumerate(sequence.rows)]
    style = (
        "text{font-family:system-ui,-apple-system,'Segoe UI',sans-serif}"
        f".heading{{font-size:16px;font-weight:600;fill:{INK}}}"
        f".title{{font-size:14px;font-weight:600;fill:{INK};text-anchor:middle}}"
        f".label{{font-size:13px;fill:{INK};text-anchor:middle;paint-order:stroke;stroke:#fff;stroke-width:4px}}"
        f".note{{font-size:13px;fill:{QUIET};font-style:italic;paint-order:stroke;stroke:#fff;stroke-width:4px}}"
    )
    body = "\n".join((f'<text x="20" y="24" class="heading">{escape(sequence.title)}</text>', *lines, *rows))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 10}" role="img" '
        f'aria-label="{escape(sequence.title)}">\n<style>{style}</style>\n'
        f'<rect width="{width}" height="{bottom + 10}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def pictures() -> dict[Path, str]:
    """Path to what has to be in it."""
    return {FOLDER / name: draw(sequence) for name, sequence in PICTURES.items()}


if __name__ == "__main__":
    for path, picture in pictures().items():
        path.write_text(picture)
