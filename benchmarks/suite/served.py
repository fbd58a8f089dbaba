"""Runs a benchmark beside a cluster of its own: `python -m benchmarks.suite.served MODULE ARGUMENTS... --serve FLAGS...`.

`{url}` among the arguments becomes the cluster's address. The exit code is the benchmark's; the cluster ends after it.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.lib.servers import HOST, cluster

PORT = 8198


def main() -> int:
    """Run the benchmark that the command line names."""
    at = sys.argv.index("--serve")
    words, flags = sys.argv[1:at], sys.argv[at + 1 :]
    with cluster(PORT, *flags):
        command = [word.replace("{url}", f"http://{HOST}:{PORT}") for word in words]
        return subprocess.run([sys.executable, "-m", *command], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
