"""How long a decode worker takes from the start of its process until it is ready: `python -m benchmarks.worker_start`.

A process that imports what a worker's process in the cluster imports, Ray included, builds the decode actor that it runs there,
with the default configuration and warm caches on disk, and starts it: model loaded, pool set aside, socket listening. Ray's
own part, to find a place and to fork the process, is left out; so is the spare process, which has the imports behind it when a
worker is replaced. Seconds; parts are measured in the same process, the pool's by making a second one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time

from benchmarks.lib.environment import ROOT

HOST = "127.0.0.1"
SECRET = b"b" * 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--began", type=float, help="be the worker, begun at that monotonic time")
    began = parser.parse_args().began
    if began is not None:
        asyncio.run(start_worker(began))
        return
    command = [sys.executable, "-m", "benchmarks.worker_start", "--began", str(time.monotonic())]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)


async def start_worker(began: float) -> None:
    import cluster.ray.worker_process  # noqa: F401  (the actor's class, and Ray with it)
    from cluster.worker_actor import FirstRankOfWorker
    from configs.models import resolve_for
    from configs.schema import ClusterConfig
    from engine.memory.kv_pool import KVPool
    from engine.model_runner import resolve_dtype
    from protocol.messages.workers import Role

    imported = time.monotonic()
    config = ClusterConfig()
    await FirstRankOfWorker(Role.DECODE, "worker-0", 1, config, SECRET, HOST, threads=1, others=[]).start()
    ready = time.monotonic()
    import torch

    dtype = getattr(torch, resolve_dtype(config.dtype))
    KVPool.for_model(resolve_for(config).facts, config.decode.kv_cache_tokens, config.block_size, dtype)
    pool_s = time.monotonic() - ready
    parts = {
        "ready_s": ready - began,
        "imports_s": imported - began,
        "pool_s": pool_s,
        "weights_and_socket_s": ready - imported - pool_s,
    }
    print(json.dumps({name: round(value, 3) for name, value in parts.items()}))


if __name__ == "__main__":
    main()
