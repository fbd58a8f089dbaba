"""Draws the badges of README, docs/badges/*.svg, from pyproject.toml and the package's version: `python docs/badges.py`."""

from __future__ import annotations

import re
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "badges"
CHARACTER, PADDING, HEIGHT = 6.6, 7, 20


def facts() -> dict[str, tuple[str, str]]:
    """Each badge's file name with its two texts."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "cluster" / "__init__.py").read_text(), re.MULTILINE)
    assert version is not None, "cluster/__init__.py has no version"
    return {
        "licence": ("licence", project["license"]),
        "python": ("python", f"{project['requires-python'].removeprefix('>=')} or newer"),
        "version": ("version", version[1]),
    }


def draw(name: str, value: str) -> str:
    """A badge of two halves as SVG, the name on grey and the value on blue."""
    left, right = (round(len(text) * CHARACTER + 2 * PADDING) for text in (name, value))
    width = left + right
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" role="img">'
        f"<title>{escape(name)}: {escape(value)}</title>"
        f'<clipPath id="round"><rect width="{width}" height="{HEIGHT}" rx="4"/></clipPath>'
        f'<g clip-path="url(#round)"><rect width="{left}" height="{HEIGHT}" fill="#59636e"/>'
        f'<rect x="{left}" width="{right}" height="{HEIGHT}" fill="#0969da"/></g>'
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
        f'<text x="{left / 2:g}" y="14" textLength="{left - 2 * PADDING}">{escape(name)}</text>'
        f'<text x="{left + right / 2:g}" y="14" textLength="{right - 2 * PADDING}">{escape(value)}</text></g></svg>\n'
    )


def pictures() -> dict[Path, str]:
    """The file of each badge, and what is drawn into it."""
    return {FOLDER / f"{name}.svg": draw(*texts) for name, texts in facts().items()}


if __name__ == "__main__":
    for target, picture in pictures().items():
        target.write_text(picture)
