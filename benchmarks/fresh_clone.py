"""How long does a newcomer wait? `python -m benchmarks.fresh_clone FOLDER`, on an idle machine; about 20 minutes.

A clone of this commit in FOLDER, which must not exist, with empty caches of its own: no packages, no model, no compiled
kernels, no measured profile.

    make serve ──► it says ready ──► README's request ──► the same again ──► Ctrl-C ──► make test ──► make docs

How long downloads take is the network's matter, so a result names how many megabytes they were. FOLDER is removed in the end.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.environment import ROOT, operators, write_result
from cluster.ray.session import free_port

ASK = {"model": "smollm2", "temperature": 0, "messages": [{"role": "user", "content": "Name the capital of France."}]}
SAYS = "Paris"
READY_S = 1800.0
END_S = 120.0
MAKE_S = 3600.0
_SUMMARY = re.compile(r"=+ (\d+ passed.*) in [\d.]+s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the clone lies meanwhile; not below /tmp, and it must not exist")
    options = parser.parse_args()
    folder = options.folder.absolute()
    if folder.exists():
        parser.error(f"{folder} exists")
    try:
        result = measure(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    write_result(f"fresh_clone_{operators()}", result, table(result))


def measure(folder: Path) -> dict[str, Any]:
    """Seconds of everything, the megabytes that are there after `make serve`, and what the tests' summaries say."""
    clone, caches = folder / "tandem", folder / "caches"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True, timeout=MAKE_S)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"XDG_CACHE_HOME": str(caches), "TANDEM_CACHE": str(caches / "tandem"), "PIP_NO_CACHE_DIR": "1"}
    result = _serve(clone, environment)
    result["megabytes"] = round((_bytes(clone / ".venv") + _bytes(caches)) / 1e6)
    result["test_s"], said = _make(clone, environment, "test")
    result["tests"] = [match[1] for match in _SUMMARY.finditer(said)]
    result["docs_s"], _ = _make(clone, environment, "docs")
    return result


def _serve(clone: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    port = free_port()
    log = clone.parent / "serve.log"
    begun = time.monotonic()
    with log.open("wb") as output, _running(["make", "serve", f"ARGS=--port {port}"], clone, environment, output) as process:
        while "ready:" not in (said := log.read_text(errors="replace")):
            if process.poll() is not None or time.monotonic() > begun + READY_S:
                raise RuntimeError(f"make serve is not ready:\n{said[-4000:]}")
            time.sleep(0.1)
        ready = time.monotonic()
        answers_s = [_answer_s(port) for _ in range(2)]
        interrupted = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        process.wait(END_S)
        ended = time.monotonic()
    return {
        "ready_s": ready - begun,
        "first_answer_s": answers_s[0],
        "next_answer_s": answers_s[1],
        "end_s": ended - interrupted,
    }


def _answer_s(port: int) -> float:
    begun = time.monotonic()
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=ASK, timeout=60)
    took = time.monotonic() - begun
    if SAYS not in answer.text:
        raise RuntimeError(f"it does not say {SAYS}: {answer.text}")
    return took


def _make(clone: Path, environment: Mapping[str, str], goal: str) -> tuple[float, str]:
    begun = time.monotonic()
    with _running(["make", goal], clone, environment, subprocess.PIPE) as process:
        said = process.communicate(timeout=MAKE_S)[0].decode(errors="replace")
    if process.returncode:
        raise RuntimeError(f"make {goal} failed:\n{said[-6000:]}")
    return time.monotonic() - begun, said


@contextmanager
def _running(command: list[str], clone: Path, environment: Mapping[str, str], output: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a process group of its own, which ends with the block."""
    process = subprocess.Popen(
        command,
        cwd=clone,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(END_S)


def _bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def table(result: Mapping[str, Any]) -> str:
    """Markdown: one row for each step."""
    rows = [
        ("`make serve`, until it says ready", f"{result['ready_s']:.0f} s"),
        ("the first answer", f"{result['first_answer_s']:.2f} s"),
        ("the same request again", f"{result['next_answer_s']:.2f} s"),
        ("Ctrl-C, until it has ended", f"{result['end_s']:.1f} s"),
        ("`make test`, its packages included", f"{result['test_s'] / 60:.1f} min"),
        ("`make docs`", f"{result['docs_s']:.0f} s"),
    ]
    lines = ["| a clone with empty caches | takes |", "|---|---|", *(f"| {what} | {time} |" for what, time in rows)]
    about = f"`make serve` has left {result['megabytes']:,} MB of packages, model and compiled kernels, from mirrors nearby."
    return "\n".join([*lines, "", about, *(f"- {each}" for each in result["tests"])])


if __name__ == "__main__":
    main()
