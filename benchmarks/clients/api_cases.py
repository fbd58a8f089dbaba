"""schemathesis, unmodified, on a running router: `python -m benchmarks.clients.api_cases URL`, with the `test` extra installed.

It reads `/openapi.json`, makes requests of it, right and wrong, and checks each answer against it: status, headers, media type
and shape, each event of a stream too. Of `tandem serve --max-model-len 512` also the longest answers end soon. Keys come from
TANDEM_API_KEY and TANDEM_ADMIN_KEY. /admin/scale is left alone here, for it would scale.
tests/unit/router/api/test_http_schemathesis.py does the same with it, in front of workers that do not compute.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import write_result

COMMAND = Path(sys.executable).with_name("schemathesis")
CONFIG = Path(__file__).with_name("schemathesis.toml")
NO_ANSWER = 0
"""In place of a status."""


@dataclass
class Cases:
    """What was sent and answered: for each endpoint, how often each status."""

    positive: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    negative: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))

    @classmethod
    def read(cls, report: Path) -> Cases:
        """From schemathesis's NDJSON report."""
        found = cls()
        for line in report.open():
            scenario = json.loads(line).get("ScenarioFinished")
            if scenario is None:
                continue
            recorder = scenario["recorder"]
            for case_id, interaction in recorder.get("interactions", {}).items():
                meta = recorder["cases"][case_id]["value"].get("meta") or {}
                mode = meta.get("generation", {}).get("mode")
                counts = found.negative if mode == "negative" else found.positive
                answer = interaction.get("response")
                counts[recorder["label"]][answer["status_code"] if answer else NO_ANSWER] += 1
        return found

    @property
    def number(self) -> int:
        return sum(counts.total() for kind in (self.positive, self.negative) for counts in kind.values())


def command(url: str, report: Path, max_examples: int, seed: int, *more: str) -> list[str]:
    """The client's command line. It exits with 0 if every answer was as documented, and none of them a 5xx."""
    return [
        str(COMMAND),
        *("--config-file", str(CONFIG)),
        *("run", f"{url}/openapi.json"),
        *("--phases", "coverage,fuzzing", "--mode", "all", "--max-examples", str(max_examples), "--seed", str(seed)),
        *("--continue-on-failure", "--no-color"),
        *("--report", "ndjson", "--report-ndjson-path", str(report)),
        *more,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--max-examples", type=int, default=100, help="of each endpoint, beside the systematic cases")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.ndjson"
        words = command(given.url, report, given.max_examples, given.seed, "--exclude-path", "/admin/scale")
        done = subprocess.run(words, cwd=folder, env={"TANDEM_API_KEY": "", "TANDEM_ADMIN_KEY": ""} | os.environ, check=False)
        cases = Cases.read(report)
    result: dict[str, Any] = {"cases": cases.number, "as_documented": done.returncode == 0}
    result |= {"valid": dict(sorted(cases.positive.items())), "invalid": dict(sorted(cases.negative.items()))}
    write_result("api_cases", result, table(cases, good=done.returncode == 0))
    sys.exit(done.returncode)


def table(cases: Cases, *, good: bool) -> str:
    verdict = "each answered as documented, none with a 5xx" if good else "NOT all answered as documented"
    rows = [
        f"{cases.number} cases, {verdict}.",
        "",
        "| statuses of each endpoint | valid by its schema | broken on purpose |",
        "|---|---|---|",
    ]
    for label in sorted({*cases.positive, *cases.negative}):
        rows.append(f"| {label} | {_counts(cases.positive[label])} | {_counts(cases.negative[label])} |")
    return "\n".join(rows)


def _counts(statuses: Counter[int]) -> str:
    return ", ".join(f"{status}: {number}" for status, number in sorted(statuses.items()))


if __name__ == "__main__":
    main()
