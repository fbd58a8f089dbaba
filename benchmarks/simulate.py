"""The simulator beside the cluster: `python -m benchmarks.simulate MEASURED.json`.

MEASURED.json, which `benchmarks.goodput --report --measured` writes, is a list of measured goodputs: {"workload": {...},
"shape": "1P1D", "targets": {"ttft": 500, "tpot": 50}, "goodput": 4.2}, where workload is {"trace": FILE, "length_scale": 8,
"num_prompts": 200, "seed": 0} or {"random_input_len": 200, "random_output_len": 200, "num_prompts": 200, "seed": 0}. Further
keys are ignored.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.environment import write_result
from configs.loader import load_config
from loadtest.datasets import Lengths
from simulator.cluster import Shape
from simulator.goodput import Targets, goodput
from simulator.profile import LAPTOP, Profile
from simulator.workload import Workload, random_workload, trace_workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--profile", type=Path, default=LAPTOP)
    options = parser.parse_args()
    rows = []
    for measured in json.loads(options.measured.read_text()):
        workload = measured["workload"]
        simulated = simulated_goodput(workload, measured["shape"], measured["targets"], options.profile)
        if "trace" in workload:
            workload = {**workload, "trace": Path(workload["trace"]).name}  # where it lies is nobody else's business
        rows.append({**measured, "workload": workload, "simulated": simulated, "ratio": simulated / measured["goodput"]})
        print(rows[-1], flush=True)
    lines = ["| workload | cluster | limits, ms | measured, requests/s | simulated | ratio |", "|---|---|---|---|---|---|"]
    for row in rows:
        limits = ", ".join(f"{name} {limit:g}" for name, limit in row["targets"].items())
        name = row["workload"].get("trace") or "random {random_input_len} in, {random_output_len} out".format(**row["workload"])
        lines.append(
            f"| {Path(name).stem} | {row['shape']} | {limits} | {row['goodput']:.2f} | {row['simulated']:.2f} "
            f"| {row['ratio']:.2f} |"
        )
    write_result("simulate", {"rows": rows}, "\n".join(lines))


def simulated_goodput(workload: dict[str, Any], shape: str, targets: dict[str, float], profile: Path = LAPTOP) -> float:
    """Requests per second, of a workload and a shape as in MEASURED.json."""
    prefill, decode = shape.removesuffix("D").split("P")
    size = Shape(int(prefill), int(decode))
    return goodput(_workload(workload), size, load_config(None, {}), Profile.load(profile), Targets(targets))


def _workload(asked: dict[str, Any]) -> Workload:
    seed, num = asked.get("seed", 0), asked["num_prompts"]
    if "trace" in asked:
        return trace_workload(Path(asked["trace"]), num, asked.get("length_scale", 1.0), seed)
    return random_workload(num, Lengths(asked["random_input_len"], asked["random_output_len"], 0.0, 0), seed)


if __name__ == "__main__":
    main()
