"""The engine beside its peers: `python -m benchmarks.engine [--peers vllm,llama.cpp,transformers --peer-env DIR]`.

Prefill and decode throughput of one rank with the default model, in tokens per second of wall time, on an idle machine. Every
system with every number of threads is a process of its own, pinned to as many cores, that lives through the whole run and is
stopped while another one measures; rounds go through all of them in turn, so that noise hits all alike. Medians over the
rounds are reported; the JSON keeps every round's numbers.

Everybody does the same work: a prefill is a prompt of n tokens up to its first token; a decode figure is the time of whole
steps at that context, after the first. Ours is `ModelRunner.execute`, greedy sampling included; vLLM's is its engine's
`step`, with its own scheduling and sampling; llama.cpp's tool computes logits and samples nothing. How each is set up says its
script in `benchmarks/peers/`. `--baseline CHECKOUT`, the engine of another commit, is one more system.

Beside it: what the machine can do (`measure_tandem.py`), the share of it that is used (`arithmetic.py`), what Python costs in a
step (`step_overhead.py`) and how long a worker takes to start (`worker_start.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.lib.engine_report import Run, report
from benchmarks.lib.environment import RESULTS, ROOT, operators, write_result
from benchmarks.lib.journal import Journal, add_state, journal_of
from benchmarks.lib.measured_process import MeasuredProcess
from benchmarks.peers.setup import LLAMA_CPP, PeerEnv
from configs.models import resolve

OURS = "tandem"
PEERS = ("vllm", "llama.cpp", "transformers")
PREFILLS = [256, 512, 1024]
DECODES = [(1, 256), (2, 256), (4, 256), (8, 256), (16, 256), (32, 256), (64, 256), (1, 1024), (16, 1024), (1, 4096)]
"""Sequences, tokens of context."""
TRANSFORMERS_DECODES = [(1, 256), (8, 256)]
SCRIPTS = Path(__file__).with_name("peers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="", help=f"a comma between two: {','.join(PEERS)}")
    parser.add_argument("--peer-env", type=Path, help="the folder made by benchmarks.peers.setup")
    parser.add_argument("--baseline", type=Path, help="another checkout of this repository")
    parser.add_argument("--threads", default="1,2", help="a comma between two")
    parser.add_argument("--rounds", type=int, default=5)
    add_state(parser)
    options = parser.parse_args()
    peers = [name for name in options.peers.split(",") if name]
    if unknown := set(peers) - set(PEERS):
        parser.error(f"--peers: {', '.join(sorted(unknown))} is none of {', '.join(PEERS)}")
    if peers and options.peer_env is None:
        parser.error("--peers needs --peer-env: see benchmarks/peers/README.md")
    threads = [int(count) for count in options.threads.split(",")]
    cores = sorted(os.sched_getaffinity(0))
    if max(threads) > len(cores):
        parser.error(f"--threads: this process has {len(cores)} cores")
    env = PeerEnv(options.peer_env.resolve()) if peers else None
    baseline = options.baseline.resolve() if options.baseline else None
    journal = journal_of(parser, options)
    systems = [OURS, *(["baseline"] if baseline else []), *peers]
    run = measure(systems, env, baseline, threads, cores, options.rounds, journal)
    command = f"python -m benchmarks.engine --threads {options.threads} --rounds {options.rounds}"
    command += f" --peers {options.peers} --peer-env DIR" if peers else ""
    command += " --baseline CHECKOUT" if baseline else ""
    name = f"engine_{operators()}"
    table = report(run, resolve("smollm2").facts, command, RESULTS / f"{name}.png")
    write_result(name, run.as_json(), table)


def measure(
    systems: list[str],
    env: PeerEnv | None,
    baseline: Path | None,
    threads: list[int],
    cores: list[int],
    rounds: int,
    journal: Journal,
) -> Run:
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes: dict[tuple[str, int], MeasuredProcess] = {}
        for system in systems:
            for count in threads:
                process = start(system, env, baseline, cores[:count], logs / f"{system}-{count}.log")
                stack.callback(process.close)
                processes[system, count] = process
                print(f"started {system}, {count} threads, {process.version}", flush=True)
        run = Run(systems, threads, {system: processes[system, threads[0]].version for system in systems})
        run.versions |= {"baseline": commit(baseline)} if baseline else {}
        for number in range(rounds):
            for (system, count), process in processes.items():
                decodes = TRANSFORMERS_DECODES if system == "transformers" else DECODES
                work = partial(process.measure, {"prefill": PREFILLS, "decode": decodes})
                measured = journal.once(f"round {number + 1}: {system}, {count} threads", work)
                run.rounds[system, count].append(measured)
                shown = ", ".join(f"{name} {value:.0f}" for name, value in measured.items())
                print(f"round {number + 1}: {system}, {count} threads: {shown}", flush=True)
    # The processes are gone: these two have the machine to themselves.
    for number in range(rounds):
        for module, found in (("step_overhead", run.step_overhead), ("worker_start", run.worker_start)):
            found.append(journal.once(f"round {number + 1}: {module}", partial(own_json, f"benchmarks.{module}")))
    return run


def start(system: str, env: PeerEnv | None, baseline: Path | None, cores: list[int], log: Path) -> MeasuredProcess:
    count = str(len(cores))
    checkout = baseline if system == "baseline" and baseline else ROOT
    environment: dict[str, str] = {}
    if system in (OURS, "baseline"):
        command = [sys.executable, str(SCRIPTS / "measure_tandem.py"), count]
        environment = {"PYTHONPATH": str(checkout)}
    else:
        assert env is not None, "checked with the options"
        peer = [str(env.python), str(SCRIPTS / f"measure_{system.replace('.', '_')}.py")]
        if system == "vllm":
            command = [*peer, str(env.model), count, ",".join(map(str, cores))]
        elif system == "llama.cpp":
            # The tool was built outside of llama.cpp's repository and does not know its own version.
            command = [*peer, str(env.llama_bench), LLAMA_CPP, str(resolve("smollm2").facts.weight_files[0]), count]
        else:
            command = [*peer, str(env.model), count]
    # Not where our packages are: some systems put their working directory on the path.
    return MeasuredProcess(system, command, cores=cores, environment=environment, cwd=log.parent, log=log)


def own_json(module: str) -> dict[str, float]:
    """What one of our scripts prints in a process of its own."""
    command = [sys.executable, "-m", module]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def commit(checkout: Path) -> str:
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
