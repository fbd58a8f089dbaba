"""The simulator beside paced clusters of several workers: `python -m benchmarks.paced_simulation --traces DIR`.

Each cluster (2P2D, 4P4D, 6P2D, 16P16D) is started with paced workers, on an idle machine, and gets the first requests of
Azure's code trace at two rates: its prefill workers are busy for half of the time, then for most of it. The simulator gets the
same prompts at the same moments, and takes step times from the same profile. It is that of an H200 with every time `SLOWER`
times as long, so that two cores carry sixteen workers of each role: what is compared is queues, the choice of workers and
batches, and not the cores. DIR is that of `benchmarks.goodput`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import write_result
from benchmarks.lib.journal import add_state, journal_of
from benchmarks.lib.load import Trace, bench_options, put_load
from benchmarks.lib.quantiles import quantile
from benchmarks.lib.servers import HOST, cluster
from benchmarks.lib.workloads import TRACES
from configs.loader import load_config
from configs.paced.profile import DEFAULT_PROFILE, PacedProfile, load_paced_profile
from simulator.cluster import Shape, simulate
from simulator.profile import Profile
from simulator.workload import Workload, trace_workload

SHAPES = (Shape(2, 2), Shape(4, 4), Shape(6, 2), Shape(16, 16))
BUSY = (0.5, 0.8)
"""Shares of the time for which the prefill workers compute, by the profile."""
SECONDS = 60
SLOWER = 8.0
QUANTILES = {"p50": 0.5, "p90": 0.9}
_TIMEOUT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--port", type=int, default=8199)
    add_state(parser)
    given = parser.parse_args()
    journal = journal_of(parser, given)
    trace = given.traces / TRACES["azure-code"][1]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "slower.json"
        profile.write_text(json.dumps(slower(load_paced_profile(DEFAULT_PROFILE), SLOWER).model_dump(mode="json")))
        for shape in SHAPES:
            rows += journal.once(str(shape), partial(compared, shape, trace, profile, given.port))
    write_result("paced_simulation", {"rows": rows}, table(rows))


def slower(profile: PacedProfile, factor: float) -> PacedProfile:
    """The profile of a machine that takes so many times as long for each step and each transfer."""

    def times(points: Sequence[Any]) -> Any:
        return tuple(point.model_copy(update={"seconds": point.seconds * factor}) for point in points)

    links = {name: getattr(profile, name) / factor for name in ("link_bytes_per_s", "host_bytes_per_s", "disk_bytes_per_s")}
    steps = {"prefill": times(profile.prefill), "decode": times(profile.decode)}
    return profile.model_copy(update={"name": f"{factor:g} times as slow as: {profile.name}", **steps, **links})


def compared(shape: Shape, trace: Path, profile: Path, port: int) -> list[dict[str, Any]]:
    """Both rates of one shape, measured and simulated."""
    flags = {"--engine": "paced", "--paced-profile": profile, "--disaggregation": "always"}
    sizes = {"--prefill": shape.prefill, "--decode": shape.decode}
    with cluster(port, *(str(word) for flag in (flags | sizes).items() for word in flag)):
        return [at_load(shape, seed, trace, profile, port) for seed in range(len(BUSY))]


def at_load(shape: Shape, seed: int, trace: Path, profile: Path, port: int) -> dict[str, Any]:
    """One rate of a cluster that is up, with prompts of its own: nothing of them is cached."""
    busy, paced = BUSY[seed], load_paced_profile(str(profile))
    rate, num_prompts = rate_of(shape, busy, trace, paced)
    options = bench_options(
        f"http://{HOST}:{port}",
        Trace("azure", trace, 1.0),
        num_prompts=num_prompts,
        seed=seed,
        request_rate=rate,
        timeout_s=_TIMEOUT_S,
    )
    records = asyncio.run(put_load(options)).records
    assert all(record.ok for record in records), "a paced cluster loses no request"
    measured = [(record.ttft or 0.0, record.tpot) for record in records]
    config = load_config(None, {"engine": "paced", "paced_profile": str(profile), "disaggregation": "always"})
    asked = trace_workload(trace, num_prompts, 1.0, seed).at_rate(rate)
    ended = simulate(asked, shape, config, Profile.of_paced(paced))
    assert not any(request.error for request in ended), "nor does a simulated one"
    row = {"shape": str(shape), "busy": busy, "rate": rate, "requests": num_prompts}
    simulated = [(request.ttft_s, request.tpot_s if request.output_len > 1 else None) for request in ended]
    return row | {"measured": summary(measured), "simulated": summary(simulated)}


def rate_of(shape: Shape, busy: float, trace: Path, paced: PacedProfile) -> tuple[float, int]:
    """Requests/s for which the shape's prefill workers compute for this share of the time, and how many come in `SECONDS`."""
    first: Workload = trace_workload(trace, 1000, 1.0, 0)
    sample_s = sum(paced.prefill_s([(0, len(sample.prompt))]) for sample in first.samples) / len(first.samples)
    rate = busy * shape.prefill / sample_s
    return rate, max(1, round(rate * SECONDS))


def summary(times: Sequence[tuple[float, float | None]]) -> dict[str, float]:
    """Milliseconds by name, of TTFT and TPOT in seconds; an answer of one token has no TPOT."""
    kinds: Mapping[str, Sequence[float]] = {
        "ttft": [ttft for ttft, _ in times],
        "tpot": [tpot for _, tpot in times if tpot is not None],
    }
    return {f"{kind}_{name}": 1e3 * quantile(kinds[kind], share) for kind in kinds for name, share in QUANTILES.items()}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: each time as measured / simulated."""
    lines = [
        "# Paced clusters simulated and measured",
        "",
        f"The first requests of Azure's code trace, prompts and answers at their lengths, {SECONDS} s at each rate. Step times "
        f"are {SLOWER:g} times those of {DEFAULT_PROFILE}, an estimate. In ms, measured / simulated:",
        "",
        "| cluster | prefill busy | requests/s | requests | TTFT p50 | TTFT p90 | TPOT p50 | TPOT p90 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = " | ".join(_both(row, f"{kind}_{name}") for kind in ("ttft", "tpot") for name in QUANTILES)
        lines.append(f"| {row['shape']} | {100 * row['busy']:.0f}% | {row['rate']:.2f} | {row['requests']} | {times} |")
    return "\n".join([*lines, "", "Command: `python -m benchmarks.paced_simulation --traces DIR`"])


def _both(row: Mapping[str, Any], name: str) -> str:
    return f"{row['measured'][name]:.0f} / {row['simulated'][name]:.0f}"


if __name__ == "__main__":
    main()
