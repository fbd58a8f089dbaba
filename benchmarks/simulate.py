"""The simulator beside the cluster: `python -m benchmarks.simulate --traces DIR`, after `benchmarks.goodput`.

Every run that the results of goodput have of `tandem` is simulated: the same prompts, arriving at the same moments. From both
follows a goodput in the same way, so they differ by what the simulator says of the cluster, and by the noise of one run each.
DIR is that of `benchmarks.goodput`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.goodput import load, seed_of
from benchmarks.lib.environment import write_result
from benchmarks.lib.goodput_report import OURS, Entry, by_workload, goodputs
from benchmarks.lib.load import Trace
from benchmarks.lib.slo import SLOS
from benchmarks.lib.workloads import prompts_of
from configs.loader import load_config
from configs.schema import ClusterConfig
from loadtest.datasets import Lengths
from simulator.cluster import Shape, simulate
from simulator.goodput import Targets
from simulator.profile import LAPTOP, Profile
from simulator.workload import Workload, random_workload, trace_workload

SHAPE = Shape(1, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--profile", type=Path, default=LAPTOP)
    options = parser.parse_args()
    config, profile = load_config(None, {"disaggregation": "always"}), Profile.load(options.profile)
    rows = []
    for workload, systems in by_workload(load()).items():
        measured = systems.get(OURS, [])
        simulated = [like(entry, options.traces, config, profile) for entry in measured]
        rows += compared(workload, measured, simulated)
    write_result("simulate", {"rows": rows}, table(rows))


def like(entry: Entry, traces: Path, config: ClusterConfig, profile: Profile) -> Entry:
    """The entry that the simulator would have written."""
    runs = []
    for run in entry["runs"]:
        asked = workload_of(entry["workload"], traces, run["sent"], seed_of(entry["seed"], run["step"]))
        ended = simulate(asked.at_rate(run["rate"]), SHAPE, config, profile)
        met = {slo.name: sum(map(Targets(slo.limits_ms).met_by, ended)) for slo in SLOS}
        runs.append({"step": run["step"], "sent": run["sent"], "met": met})
    return {"runs": runs}


def workload_of(name: str, traces: Path, num_prompts: int, seed: int) -> Workload:
    """As `benchmarks.lib.workloads` has it."""
    prompts = prompts_of(name, traces)
    if isinstance(prompts, Trace):
        return trace_workload(prompts.path, num_prompts, prompts.length_scale, seed)
    return random_workload(
        num_prompts, Lengths(input_len=prompts.input_len, output_len=prompts.output_len, range_ratio=0.0, prefix_len=0), seed
    )


def compared(workload: str, measured: Sequence[Entry], simulated: Sequence[Entry]) -> list[dict[str, Any]]:
    """For each pair of limits the medians of the seeds; none where no rate that was tried was good."""
    rows = []
    for slo in (slo for slo in SLOS if slo.scale == 1.0 and measured):
        real, made_up = (statistics.median(goodputs(entries, slo)) for entries in (measured, simulated))
        if real:
            limits = {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms}
            row = {"workload": workload, "cluster": str(SHAPE), **limits, "seeds": len(measured)}
            rows.append({**row, "measured": real, "simulated": made_up, "ratio": made_up / real})
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "# Goodput simulated and measured",
        "",
        "The same runs in a cluster and in the simulator: requests/s at which 90 % meet their limits, medians of the seeds.",
        "",
        "| workload | cluster | TTFT / TPOT | seeds | measured | simulated | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        limits = f"{row['ttft_ms']:g} / {row['tpot_ms']:g} ms"
        figures = " | ".join(f"{row[name]:.2f}" for name in ("measured", "simulated", "ratio"))
        lines.append(f"| {row['workload']} | {row['cluster']} | {limits} | {row['seeds']} | {figures} |")
    return "\n".join([*lines, "", "Command: `python -m benchmarks.simulate --traces DIR`"])


if __name__ == "__main__":
    main()
