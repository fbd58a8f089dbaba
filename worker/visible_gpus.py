"""Which GPUs a rank's process sees: its own first, then the others of its node.

Ray shows an actor its own GPU alone. CUDA then maps no memory of another one, so neither CUDA IPC nor NCCL could copy between
GPUs directly. A rank computes on its first GPU only; of the others it reads what their workers give it to read.
"""

from __future__ import annotations

import os

from configs.machine import num_gpus


def show_neighbours() -> None:
    """Let this process see the node's other GPUs behind its own, if it has one. Called before CUDA starts."""
    own, count = os.environ.get("CUDA_VISIBLE_DEVICES"), num_gpus(environment={})
    if own and count:
        os.environ["CUDA_VISIBLE_DEVICES"] = own_first(own, count)


def own_first(own: str, count: int) -> str:
    """Return the GPUs of a node that has `count`, those of `own` first, as CUDA_VISIBLE_DEVICES names them.

    What is no list of numbers stays as it is: names of GPUs, or of their slices, which have no peers.
    """
    names = own.split(",")
    if not all(name.isdecimal() for name in names):
        return own
    return ",".join([*names, *(str(other) for other in range(count) if str(other) not in names)])
