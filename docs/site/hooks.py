"""How MkDocs builds the site: which files are its pages, and what anchors their headings have.

Pages keep their places in the repository, so that a relative link leads to the same page here and on GitHub. MkDocs calls the
functions `on_...` by their names. mkdocs.yml names this file.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
TARGET = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)|<img\b[^>]*?src=\"([^\"]+)\"")
OTHERS = (Path("docs/site/site.css"), Path("router/page/icon.svg"))

MESSAGES = ("workers", "common", "load", "decode", "prefill", "handoff")
REFERENCE = {
    "router": (
        "A request in the router",
        "The way of one request, and the line where it waits.",
        ["router.request.pipeline", "router.dispatch.admission", "router.dispatch.journal", "router.rules.retry_policy"],
    ),
    "wire": (
        "The wire",
        "What routers and workers say to each other.",
        ["protocol.messages", *(f"protocol.messages.{name}" for name in MESSAGES), "protocol.wire", "protocol.sampling"],
    ),
    "tickets": (
        "Tickets and audit",
        "Who owns which KV block.",
        ["protocol.ticket", "decode_workers.ledger", "decode_workers.attached_tickets", "protocol.audit"],
    ),
    "errors": ("Errors", "What bad input and lost peers raise.", ["protocol.errors"]),
    "handoff": (
        "The KV handoff",
        "The ends of a transfer, and what a transport has to do.",
        ["kv_transfer.transport", "kv_transfer.plan", "kv_transfer.shards", "kv_transfer.sender", "kv_transfer.receiver"],
    ),
    "schedulers": (
        "Schedulers",
        "Which prompts and streams a step computes.",
        ["prefill_workers.scheduler", "decode_workers.scheduler", "engine.batch"],
    ),
    "engine": (
        "The engine",
        "What computes a step.",
        ["engine.runner", "engine.model_runner", "engine.operators", "engine.sampler"],
    ),
    "configuration": (
        "Configuration",
        "Every setting, with its bounds. `configs/local.yaml` has them with their defaults, as a file.",
        ["configs.schema", "configs.autoscale", "configs.facts"],
    ),
    "metrics": ("Metrics", "What is counted, and by which name.", ["telemetry.metrics", "telemetry.cluster_metrics"]),
    "load-tests": ("Load tests", "How a server is measured.", ["loadtest.options", "loadtest.records", "loadtest.metrics"]),
}
"""File name of a page to its title, what it is about, and the modules whose docstrings it shows."""
WHOLE = {"wire", "configuration"}
"""Pages that show fields without a docstring, too: of a message or a setting the name and the type say something."""


def pages() -> list[Path]:
    """The Markdown files of the site, relative to the repository."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md"), ROOT / "tests/README.md"]
    return sorted(path.relative_to(ROOT) for path in found)


def linked_files(page: Path) -> set[Path]:
    """Pictures, configurations and other files that a page links to, relative to the repository; no pages."""
    found: set[Path] = set()
    for markdown, picture in TARGET.findall((ROOT / page).read_text()):
        target = (ROOT / page.parent / (markdown or picture)).resolve()
        if target.is_file() and target.suffix != ".md" and target.is_relative_to(ROOT):
            found.add(target.relative_to(ROOT))
    return found


def reference_page(name: str) -> str:
    title, about, modules = REFERENCE[name]
    shows = str(name in WHOLE).lower()
    blocks = (f"::: {each}\n    options:\n      toc_label: {each}\n      show_if_no_docstring: {shows}" for each in modules)
    return "\n\n".join([f"# {title}", about, *blocks]) + "\n"


def slug(heading: str, separator: str) -> str:
    """The anchor that GitHub makes of a heading: lower case, no punctuation, a dash for each space."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put the pages of the whole repository, what they link to, and the reference in the place of the files of one folder."""
    ours = pages()
    names = {*ours, *OTHERS}.union(*(linked_files(page) for page in ours))
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    for name in sorted(names):
        files.append(File.generated(config, str(name), abs_src_path=str(ROOT / name)))
    for name in REFERENCE:
        files.append(File.generated(config, f"docs/reference/{name}.md", content=reference_page(name)))
    return files
