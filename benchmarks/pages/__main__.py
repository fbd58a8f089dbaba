"""Writes the pages of results anew: `make results`, or `python -m benchmarks.pages`. It measures nothing.

Written are benchmarks/results/README.md, and in README.md and docs what lies between markers (`benchmarks/pages/markers.py`).
"""

from __future__ import annotations

import sys

from benchmarks.pages.history import History
from benchmarks.pages.site import current_pages, generated_pages


def main() -> int:
    """Write the pages that have changed; the exit code is 1 if this clone is too shallow to tell ages."""
    history = History()
    if not history.is_whole:
        print("the ages of results need the whole history: git fetch --unshallow", file=sys.stderr)
        return 1
    pages = current_pages()
    for path, text in generated_pages(history).items():
        if pages.get(path) != text:
            path.write_text(text)
            print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
