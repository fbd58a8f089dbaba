"""Which transports a configuration gives a worker, by where its pool lies."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from configs.schema import TransportName
from kv_transfer.choice import receiving_transports, sending_transports
from kv_transfer.transports.nccl_library import NcclLibrary
from protocol.errors import ConfigError

FD = 7
HOST = "127.0.0.1"
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def some_nccl() -> NcclLibrary:
    return Mock(spec=NcclLibrary)


def no_nccl() -> None:
    return None


def pool_on(device: torch.device) -> Tensor:
    """As far as the choice looks at it."""
    return Mock(spec=Tensor, device=device)


def share(pool: Tensor) -> bytes:
    return b"handle"


def can_not_share(pool: Tensor) -> bytes:
    raise RuntimeError("CUDA error: operation not supported")


@pytest.mark.parametrize(
    ("device", "wanted", "names"),
    [
        (CPU, "auto", ["shared_memory", "gloo"]),
        (CPU, "shared_memory", ["shared_memory"]),
        (CPU, "gloo", ["gloo"]),
        (GPU, "auto", ["cuda_ipc", "nccl"]),
        (GPU, "cuda_ipc", ["cuda_ipc"]),
        (GPU, "nccl", ["nccl"]),
    ],
)
def test_both_sides_have_what_is_wanted_the_best_first(device: torch.device, wanted: TransportName, names: list[str]) -> None:
    assert [transport.name for transport in sending_transports(wanted, HOST, pool_on(device), FD, share, some_nccl)] == names
    assert [transport.name for transport in receiving_transports(wanted, HOST, device, some_nccl)] == names


def test_a_pool_that_is_not_shared_leaves_gloo() -> None:
    assert [transport.name for transport in sending_transports("auto", HOST, pool_on(CPU), None)] == ["gloo"]
    with pytest.raises(ConfigError, match="can't be shared") as caught:
        sending_transports("shared_memory", HOST, pool_on(CPU), None)
    assert caught.value.param == "transport"


@pytest.mark.parametrize(
    ("device", "wanted", "missing"),
    [
        (CPU, "nccl", "nccl is for KV pools on GPUs, and this one lies in the processor's memory"),
        (CPU, "cuda_ipc", "cuda_ipc is for KV pools on GPUs"),
        (GPU, "gloo", "gloo is for KV pools in the processor's memory, and this one lies on a GPU"),
        (GPU, "shared_memory", "shared_memory is for KV pools in the processor's memory"),
        (GPU, "nccl", "there is no NCCL of version 2.14 or newer"),
    ],
)
def test_what_can_not_be_had_is_refused_with_what_is_missing(device: torch.device, wanted: TransportName, missing: str) -> None:
    for choose in (
        lambda: sending_transports(wanted, HOST, pool_on(device), None, share, no_nccl),
        lambda: receiving_transports(wanted, HOST, device, no_nccl),
    ):
        with pytest.raises(ConfigError, match=missing) as caught:
            choose()
        assert caught.value.param == "transport"


def test_gpus_that_lack_one_have_the_other() -> None:
    pool = pool_on(GPU)
    assert [transport.name for transport in sending_transports("auto", HOST, pool, None, can_not_share, some_nccl)] == ["nccl"]
    with pytest.raises(ConfigError, match="can't be shared between processes"):
        sending_transports("cuda_ipc", HOST, pool, None, can_not_share, some_nccl)
    with pytest.raises(ConfigError, match=r"no NCCL of version 2\.14"):
        sending_transports("auto", HOST, pool, None, can_not_share, no_nccl)
    assert [transport.name for transport in receiving_transports("auto", HOST, GPU, no_nccl)] == ["cuda_ipc"]


def test_what_can_not_encrypt_is_left_out_where_kv_is_to_be_encrypted() -> None:
    cases: list[tuple[TransportName, list[str]]] = [
        ("auto", ["shared_memory", "gloo_encrypted"]),
        ("gloo", ["gloo_encrypted"]),
    ]
    for wanted, expected in cases:
        sending = sending_transports(wanted, HOST, pool_on(CPU), FD, encrypt=True)
        assert [transport.name for transport in sending] == expected
        assert [transport.name for transport in receiving_transports(wanted, HOST, CPU, encrypt=True)] == expected
    assert [transport.name for transport in receiving_transports("auto", HOST, GPU, some_nccl, encrypt=True)] == ["cuda_ipc"]
    with pytest.raises(ConfigError, match="NCCL does not encrypt"):
        receiving_transports("nccl", HOST, GPU, some_nccl, encrypt=True)
