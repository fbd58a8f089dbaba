"""A part for tests: does what its first argument says."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FOREVER_S = 600


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["print", "exit", "hang", "tidy", "count"])
    parser.add_argument("value", nargs="?", default="")
    parser.add_argument("--state", type=Path)
    given = parser.parse_args()
    if given.what == "print":
        sys.stdout.write(f"{given.value}\n")
    elif given.what == "exit":
        sys.exit(int(given.value))
    elif given.what == "hang":
        hang(Path(given.value))
    elif given.what == "tidy":
        tidy(Path(given.value))
    else:
        seen = given.state.read_text() if given.state.exists() else ""
        given.state.write_text(f"{seen}x")
        sys.stdout.write(f"{len(seen) + 1}\n")


def hang(pids: Path) -> None:
    """Ignore SIGINT, as the child does, and wait."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER_S})"], start_new_session=True)
    pids.write_text(f"{os.getpid()} {child.pid}")
    time.sleep(FOREVER_S)


def tidy(file: Path) -> None:
    try:
        time.sleep(FOREVER_S)
    except KeyboardInterrupt:
        file.write_text("as by Ctrl-C")


if __name__ == "__main__":
    main()
