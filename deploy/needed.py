"""Print what Tandem needs, one requirement a line: `python3 deploy/needed.py autoscale otlp` for these extras, too.

It reads the `pyproject.toml` of the working directory. An image installs this before the code, which changes more often.
Imports the standard library only.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def needed(pyproject: str, extras: list[str]) -> list[str]:
    """Return the requirements of a project and of these extras. Raises KeyError for an extra that there is not."""
    project = tomllib.loads(pyproject)["project"]
    return [*project["dependencies"], *(each for name in extras for each in project["optional-dependencies"][name])]


if __name__ == "__main__":
    sys.stdout.write("".join(f"{each}\n" for each in needed(Path("pyproject.toml").read_text(), sys.argv[1:])))
