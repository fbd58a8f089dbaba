"""Writes docs/modules/: a page for each group of packages, with the first sentence of every module's docstring.

    python docs/module_map.py

So the module map says what the code says, and a test finds it out of date.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = {
    "router": ("The router", ["router"]),
    "workers": ("Workers and the engine", ["prefill_workers", "decode_workers", "worker", "engine"]),
    "shared": ("What the parts share", ["protocol", "configs", "telemetry", "kv_transfer"]),
    "operating": ("The cluster", ["cluster", "autoscaler"]),
    "tools": ("Tools beside the cluster", ["simulator", "loadtest", "certify"]),
}
"""Page to its title and the packages that it describes."""


def first_sentence(path: Path) -> str:
    """The first sentence of the module's docstring, on one line. Raises ValueError if there is none."""
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    if not docstring:
        raise ValueError(f"{path} has no docstring")
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".").replace("|", "\\|") + "."


def folders(package: str) -> Iterator[Path]:
    """The folders of a package that hold modules, each before those inside it."""
    for folder in sorted({path.parent for path in (ROOT / package).rglob("*.py")}):
        if modules(folder):
            yield folder


def modules(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")


def page(title: str, packages: list[str]) -> str:
    lines = [f"# {title}", "", "Written by `docs/module_map.py` from the docstrings; `make docs` renews it.", ""]
    for package in packages:
        for folder in folders(package):
            lines += [f"## {folder.relative_to(ROOT)}/", "", "| module | what it is |", "|---|---|"]
            lines += [f"| `{path.name}` | {first_sentence(path)} |" for path in modules(folder)] + [""]
    return "\n".join(lines)


def index() -> str:
    lines = ["# Module map", "", "One line on every module, by the folder that it is in. What may import what stands in"]
    lines += ["[architecture.md](../architecture.md#who-may-import-whom).", ""]
    for name, (title, packages) in PAGES.items():
        folder_names = ", ".join(f"`{package}/`" for package in packages)
        lines.append(f"- [{title}]({name}.md): {folder_names}")
    return "\n".join([*lines, ""])


def pages() -> dict[str, str]:
    """File name in docs/modules/ to its text."""
    return {"README.md": index(), **{f"{name}.md": page(*about) for name, about in PAGES.items()}}


if __name__ == "__main__":
    target = ROOT / "docs" / "modules"
    target.mkdir(exist_ok=True)
    for name, text in pages().items():
        (target / name).write_text(text)
