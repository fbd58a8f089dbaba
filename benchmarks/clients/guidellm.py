"""guidellm, unmodified, on a running cluster: `python -m benchmarks.clients.guidellm URL DIR`.

DIR is a folder for an environment of its own, with guidellm from wherever pip is configured to find it; what is there already
is kept. The cluster serves the default model, whose tokenizer guidellm gets as a Hugging Face directory. It sends chats of
synthetic text, streamed, one at a time and four at a time, and counts what it gets by itself.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import write_result
from benchmarks.peers.hf_directory import write_tokenizer
from configs.models import resolve

GUIDELLM = "guidellm==0.8.1"
PROMPT_TOKENS, ANSWER_TOKENS = 128, 32
STREAMS = (1, 4)
REQUESTS = 30
"""For each number of streams."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("directory", type=Path)
    given = parser.parse_args()
    command = installed(given.directory.resolve())
    with tempfile.TemporaryDirectory() as folder:
        report = run(command, given.url, Path(folder), STREAMS, REQUESTS, ANSWER_TOKENS, seed=0)
    rows = [row(benchmark) for benchmark in report["benchmarks"]]
    for found in rows:
        assert (found["completed"], found["failed"]) == (REQUESTS, 0), found
    write_result("guidellm", {"client": GUIDELLM, "rows": rows}, table(rows))


def installed(directory: Path) -> Path:
    """The command, in an environment that is made if it is not there."""
    python = directory / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    subprocess.run([str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", GUIDELLM], check=True)
    return directory / "bin" / "guidellm"


def run(command: Path, url: str, folder: Path, streams: Sequence[int], requests: int, answer_tokens: int, seed: int) -> Any:
    """guidellm's own report, of so many requests for each number of streams. With an equal seed its prompts are equal."""
    write_tokenizer(resolve("smollm2").facts, folder / "tokenizer")
    options = {
        "--backend": {"kind": "openai_http", "target": url, "model": "smollm2"},
        "--tokenizer": {"kind": "huggingface_auto", "model": f"{folder}/tokenizer"},
        "--profile": {"kind": "concurrent", "streams": streams},
        "--data": {"kind": "synthetic_text", "prompt_tokens": PROMPT_TOKENS, "output_tokens": answer_tokens},
        "--seed": {"kind": "static", "value": seed},
        "--constraint": {"kind": "max_requests", "count": requests},
        "--output": {"kind": "json", "path": f"{folder}/report.json"},
    }
    words = [word for name, value in options.items() for word in (name, json.dumps(value))]
    subprocess.run([str(command), "run", *words, "--disable-console"], cwd=folder, check=True, timeout=900)
    return json.loads((folder / "report.json").read_text())


def row(benchmark: Any) -> dict[str, Any]:
    """Of one number of streams; times in ms, medians."""
    requests, metrics = benchmark["requests"], benchmark["metrics"]

    def median(name: str) -> float:
        return float(metrics[name]["successful"]["median"])

    return {
        "streams": benchmark["config"]["strategy"]["streams"],
        "completed": len(requests["successful"]),
        "failed": len(requests["errored"] or ()) + len(requests["incomplete"] or ()),
        "prompt_tokens": median("prompt_token_count"),
        "answer_tokens": median("output_token_count"),
        "ttft_ms": median("time_to_first_token_ms"),
        "itl_ms": median("inter_token_latency_ms"),
        "answer_tokens_per_s": float(metrics["output_tokens_per_second"]["successful"]["mean"]),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{GUIDELLM}, unmodified: {REQUESTS} chats for each number of streams, all of them answered",
        "",
        "| streams | prompt tokens | answer tokens | TTFT, median | ITL, median | answer tokens/s |",
        "|---|---|---|---|---|---|",
    ]
    for each in rows:
        lines.append(
            f"| {each['streams']} | {each['prompt_tokens']:.0f} | {each['answer_tokens']:.0f} | {each['ttft_ms']:.0f} ms "
            f"| {each['itl_ms']:.1f} ms | {each['answer_tokens_per_s']:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
