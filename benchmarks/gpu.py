"""Everything about one GPU in one command: `python -m benchmarks.gpu`, made for one with 80 GB or more.

First the tests of tests/gpu. Then what the GPU reaches in a copy and in a large product; each Triton kernel beside these; whole
prefill and decode steps of a model of Llama 8B's shape with random weights, beside transformers on the same weights.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import version

import torch

from benchmarks.lib.environment import ROOT, write_result
from benchmarks.lib.gpu_model import decoder_weights, transformers_model
from benchmarks.lib.gpu_steps import STEPS, StepTiming, same_tokens, smollm2_tokens, step_timings
from certify.ceilings import Ceilings, ceilings
from certify.kernels.times import DTYPE, Timing, timings
from certify.random_model import BLOCK_SIZE, runner_of
from certify.shapes import LLAMA_8B
from certify.step_times import token_ids
from engine.memory.kv_pool import KVPool


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("there is no GPU that torch can use here")
    gpu = {
        "gpu": torch.cuda.get_device_name(),
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "triton": version("triton"),
        "transformers": version("transformers"),
    }
    tests = _tests()
    with torch.inference_mode():
        best = ceilings(torch.device("cuda"))
        pool = KVPool.for_model(LLAMA_8B, STEPS.pool_tokens, BLOCK_SIZE, DTYPE, device=torch.device("cuda"))
        pool.data.normal_()
        kernels = list(timings(LLAMA_8B, pool))
        peer = transformers_model(LLAMA_8B, DTYPE, torch.device("cuda"))
        runner = runner_of(LLAMA_8B, decoder_weights(peer, LLAMA_8B), pool, "bfloat16")
        steps = step_timings(LLAMA_8B, runner, peer)
        # Of random weights the best logits lie close together, and bfloat16 decides otherwise now and then.
        checks = {
            "tests/gpu": tests,
            "8B shape, bfloat16": same_tokens(runner, peer, [token_ids(length) for length in (5, 700, 64)], steps=32),
        }
        del runner, peer, pool
        torch.cuda.empty_cache()
        checks["smollm2, float32"] = smollm2_tokens()
    result = {
        "gpu": gpu,
        "ceilings": asdict(best),
        "checks": checks,
        "kernels": [asdict(one) for one in kernels],
        "steps": [asdict(one) for one in steps],
    }
    write_result("gpu", result, table(gpu, best, checks, kernels, steps))


def table(
    gpu: dict[str, str | None], best: Ceilings, checks: dict[str, str], kernels: list[Timing], steps: list[StepTiming]
) -> str:
    """Times in milliseconds; rates as parts of what the GPU reaches in a copy and in a product."""
    lines = ["# On one GPU", "", ", ".join(f"{name} {value}" for name, value in gpu.items()), ""]
    lines += [f"- {name}: {found}" for name, found in checks.items()]
    lines += [
        f"- a copy moves {best.bytes_per_s / 1e12:.2f} TB/s, read and written",
        f"- a bfloat16 product of random matrices of 8,192 takes {best.flops_per_s / 1e12:.0f} TFLOP/s",
        "",
        "| kernel, Llama 8B's shape, one layer | ms | of the copy | of the product | torch's attention, ms |",
        "|---|---|---|---|---|",
    ]
    for one in kernels:
        moved, computed = one.moved_bytes / one.seconds / best.bytes_per_s, one.flops / one.seconds / best.flops_per_s
        theirs = "" if one.torch_seconds is None else f"{one.torch_seconds * 1e3:.3f}"
        lines.append(f"| {one.name} | {one.seconds * 1e3:.3f} | {moved:.0%} | {computed:.0%} | {theirs} |")
    lines += [
        "",
        "| step, Llama 8B's shape, random weights | ms | tokens/s | of the copy | of the product | transformers, ms |",
        "|---|---|---|---|---|---|",
    ]
    for step in steps:
        moved, computed = step.moved_bytes / step.seconds / best.bytes_per_s, step.flops / step.seconds / best.flops_per_s
        theirs = "" if step.peer_seconds is None else f"{step.peer_seconds * 1e3:.1f}"
        rates = f"{step.tokens / step.seconds:,.0f} | {moved:.0%} | {computed:.0%}"
        lines.append(f"| {step.name} | {step.seconds * 1e3:.1f} | {rates} | {theirs} |")
    return "\n".join([*lines, "", "Command: `python -m benchmarks.gpu`"])


def _tests() -> str:
    """pytest's last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout[-4000:])
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-200:]


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]


if __name__ == "__main__":
    main()
