"""Draws docs/data_path.svg, the way of a request through the cluster: `python docs/data_path.py`."""

from __future__ import annotations

from html import escape
from pathlib import Path

TARGET = Path(__file__).with_name("data_path.svg")
WIDTH, HEIGHT = 960, 448
INK, QUIET, LINE = "#1f2328", "#59636e", "#8c959f"
MESSAGE, KV, CONTROL = "#0969da", "#bc4c00", "#8c959f"

STEPS = (
    "The router makes token ids of the text, and waits for a pair of workers with room.",
    "Decode reserves KV blocks for the prompt and the beginning of the answer: a ticket, or “full”.",
    "Prefill computes the prompt in chunks, and samples the first token.",
    "The KV goes from pool to pool, layer by layer, while the next layers are computed.",
    "A commit record with a fingerprint of every block closes the transfer. Decode checks it.",
    "Decode makes the other tokens, and sends one frame per step to each router.",
)


def box(x: int, y: int, width: int, height: int, title: str, *lines: str, fill: str = "#ffffff") -> str:
    """A rounded box with a bold title and quiet lines below, all centred."""
    middle = x + width // 2
    top = y + height // 2 - 9 * len(lines) + 5
    texts = [f'<text x="{middle}" y="{top}" class="title">{escape(title)}</text>']
    texts += [
        f'<text x="{middle}" y="{top + 19 * number}" class="quiet">{escape(line)}</text>'
        for number, line in enumerate(lines, 1)
    ]
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}" stroke="{LINE}" stroke-width="1.5"/>'
    return "\n".join((shape, *texts))


def arrow(path: str, colour: str, *, both: bool = False, dashed: bool = False, width: float = 2) -> str:
    """A line along an SVG path with a head at its end, or at both."""
    heads = f' marker-end="url(#{_head(colour)})"' + (f' marker-start="url(#{_head(colour)})"' if both else "")
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{heads}{dashes}/>'


def step(number: int, x: int, y: int) -> str:
    """The number of a step, white in a dark disc."""
    return f'<circle cx="{x}" cy="{y}" r="11" fill="{INK}"/><text x="{x}" y="{y + 5}" class="number">{number}</text>'


def label(x: int, y: int, text: str, *, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" class="quiet" style="text-anchor:{anchor}">{escape(text)}</text>'


def legend(top: int) -> str:
    """The steps, one a line."""
    rows = []
    for index, sentence in enumerate(STEPS):
        y = top + 24 * index
        rows.append(step(index + 1, 45, y - 5))
        rows.append(f'<text x="66" y="{y}" class="sentence">{escape(sentence)}</text>')
    return "\n".join(rows)


def _head(colour: str) -> str:
    return "head" + colour.lstrip("#")


def _marker(colour: str) -> str:
    return (
        f'<marker id="{_head(colour)}" viewBox="0 0 10 10" refX="8.5" refY="5" markerUnits="userSpaceOnUse" markerWidth="11" '
        f'markerHeight="11" orient="auto-start-reverse"><path d="M0 0 10 5 0 10z" fill="{colour}"/></marker>'
    )


def draw() -> str:
    """The whole picture as SVG."""
    parts = [
        box(30, 100, 110, 64, "client", "HTTP, SSE"),
        box(270, 84, 190, 96, "router", "text ↔ token ids", "queue, journal", fill="#ddf4ff"),
        box(680, 30, 240, 76, "prefill worker", "reads prompts", fill="#fff8c5"),
        box(680, 190, 240, 76, "decode worker", "makes tokens", fill="#dafbe1"),
        box(270, 214, 190, 60, "controller", "starts, watches, scales"),
        arrow("M142 132 H268", MESSAGE, both=True),
        step(1, 205, 132),
        arrow("M462 112 L678 68", MESSAGE, both=True),
        step(3, 570, 90),
        arrow("M462 152 L678 208", MESSAGE, both=True),
        step(2, 534, 171),
        step(6, 606, 189),
        arrow("M800 106 V188", KV, width=6),
        step(4, 776, 136),
        step(5, 776, 164),
        label(816, 152, "KV cache", anchor="start"),
        arrow("M365 212 V182", CONTROL, dashed=True, both=True),
        arrow("M462 244 H678", CONTROL, dashed=True),
        label(570, 262, "both kinds of workers"),
        legend(312),
    ]
    style = (
        "text{font-family:-apple-system,BlinkMacSystemFont,'Segoe UI','Noto Sans',Helvetica,Arial,sans-serif;font-size:14px;"
        f"fill:{INK};text-anchor:middle}}.title{{font-weight:600;font-size:16px}}.quiet{{fill:{QUIET}}}"
        ".number{fill:#fff;font-weight:600}.sentence{text-anchor:start}"
    )
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            "<title>The way of a request: router, prefill worker, KV cache, decode worker</title>",
            f"<style>{style}</style>",
            f"<defs>{_marker(MESSAGE)}{_marker(KV)}{_marker(CONTROL)}</defs>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        )
    )


if __name__ == "__main__":
    TARGET.write_text(draw())
