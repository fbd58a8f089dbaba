"""Whether workers fit on nodes, and how many cores each gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.ray.placement import bundle_of, crowding, lacks_entries, missing, threads_per_rank, unplaceable
from configs.schema import ClusterConfig, DecodeConfig, HttpConfig, PoolConfig, PrefillConfig
from protocol.messages.workers import Role

LAPTOP = [{"CPU": 2.0, "memory": 8e9}]
GPU_NODES = [
    {"CPU": 8.0},
    {"CPU": 8.0, "GPU": 1.0, "tandem_prefill": 1.0},
    {"CPU": 8.0, "GPU": 1.0, "tandem_decode": 1.0},
]


def on_gpus(prefill: int, decode: int) -> ClusterConfig:
    return ClusterConfig(
        prefill=PrefillConfig(workers=prefill, resources={"GPU": 1.0, "tandem_prefill": 1.0}),
        decode=DecodeConfig(workers=decode, resources={"GPU": 1.0, "tandem_decode": 1.0}),
    )


def test_a_laptop_holds_any_number_of_workers_that_ask_for_nothing() -> None:
    config = ClusterConfig(prefill=PrefillConfig(workers=40), decode=DecodeConfig(workers=60))
    assert unplaceable(config, LAPTOP) is None
    assert bundle_of(config.prefill), "Ray refuses an empty bundle"


def test_a_resource_that_no_node_has_is_named() -> None:
    reason = unplaceable(on_gpus(1, 1), LAPTOP)
    assert reason is not None
    assert reason.startswith("prefill: a worker needs {GPU: 1, tandem_prefill: 1} on one node")
    assert "{GPU: 0, tandem_prefill: 0}" in reason


def test_too_many_workers_for_the_nodes() -> None:
    assert unplaceable(on_gpus(1, 1), GPU_NODES) is None
    reason = unplaceable(on_gpus(1, 2), GPU_NODES)
    assert reason == "decode: room for 1 of 2 workers; each needs {GPU: 1, tandem_decode: 1} on one node"


def test_a_gang_needs_its_resources_on_one_node() -> None:
    pool = PoolConfig(tensor_parallel_size=2, resources={"GPU": 1.0})
    assert missing(pool, [{"GPU": 1.0}, {"GPU": 1.0}]) is not None
    assert missing(pool, [{"GPU": 2.0}]) is None
    assert missing(pool, []) is not None


@pytest.mark.parametrize(
    ("prefill", "decode", "nodes", "threads"),
    [
        (1, 1, [2.0], 1),
        (1, 1, [8.0], 4),
        (2, 3, [2.0], 1),
        (1, 1, [4.0, 4.0], 4),
        (1, 1, [4.0, 4.0, 4.0], 4),
        (2, 2, [4.0, 4.0, 4.0], 2),
        (1, 2, [6.0, 6.0, 6.0], 6),
        (1, 1, [], 1),
    ],
)
def test_cores_are_shared_equally(prefill: int, decode: int, nodes: list[float], threads: int) -> None:
    config = ClusterConfig(prefill=PrefillConfig(workers=prefill), decode=DecodeConfig(workers=decode))
    assert threads_per_rank(config, Role.DECODE, [{"CPU": cores} for cores in nodes]) == threads


def test_cores_count_only_where_a_worker_can_be() -> None:
    """A head node has none to share, and nor has a node of the other role."""
    nodes = [{"CPU": 8.0}, {"CPU": 8.0, "tandem_prefill": 2.0}, {"CPU": 12.0, "tandem_decode": 3.0}]
    config = ClusterConfig(
        prefill=PrefillConfig(workers=2, resources={"tandem_prefill": 1.0}),
        decode=DecodeConfig(workers=3, resources={"tandem_decode": 1.0}),
    )
    assert [threads_per_rank(config, role, nodes) for role in (Role.PREFILL, Role.DECODE)] == [4, 4]
    anywhere = ClusterConfig(prefill=PrefillConfig(workers=2), decode=DecodeConfig(workers=3, resources={"tandem_decode": 1.0}))
    assert threads_per_rank(anywhere, Role.DECODE, nodes) == 3, "some of the prefill workers may be there, too"
    assert threads_per_rank(config, Role.DECODE, [{"CPU": 20.0}]) == 4, "a machine that has none of these resources"


def test_the_configured_number_of_threads_counts() -> None:
    config = ClusterConfig(decode=DecodeConfig(threads=3))
    assert threads_per_rank(config, Role.DECODE, LAPTOP) == 3
    assert threads_per_rank(config, Role.PREFILL, LAPTOP) == 1


@pytest.mark.parametrize(("threads", "ranks", "each"), [(8, 2, 4), (8, 3, 2), (2, 4, 1), (None, 2, 4)])
def test_the_ranks_of_a_worker_share_its_cores(threads: int | None, ranks: int, each: int) -> None:
    config = ClusterConfig(decode=DecodeConfig(threads=threads, tensor_parallel_size=ranks))
    assert threads_per_rank(config, Role.DECODE, [{"CPU": 16.0}]) == each


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 5), st.integers(0, 5))
def test_workers_fit_exactly_when_there_are_as_many_nodes(
    prefill: int, decode: int, with_prefill: int, with_decode: int
) -> None:
    nodes = [{"GPU": 1.0, "tandem_prefill": 1.0}] * with_prefill + [{"GPU": 1.0, "tandem_decode": 1.0}] * with_decode
    fits = unplaceable(on_gpus(prefill, decode), nodes) is None
    assert fits == (with_prefill >= prefill and with_decode >= decode)


def test_more_threads_than_cores_are_a_crowd() -> None:
    def of(prefill: int, decode: int, threads: int | None = None) -> ClusterConfig:
        return ClusterConfig(
            device="cpu",
            prefill=PrefillConfig(workers=prefill, threads=threads),
            decode=DecodeConfig(workers=decode, threads=threads),
        )

    assert crowding(of(2, 2), 2) == "2 prefill and 2 decode workers compute with 4 threads on 2 cores"
    assert crowding(of(1, 1), 1) == "1 prefill and 1 decode workers compute with 2 threads on 1 core"
    assert crowding(of(1, 1), 2) is None
    assert crowding(of(2, 2), 4) is None
    assert crowding(of(2, 2, threads=2), 7) == "2 prefill and 2 decode workers compute with 8 threads on 7 cores"
    assert crowding(of(2, 2, threads=2), 8) is None
    paced = of(9, 9).model_copy(update={"engine": "paced"})
    assert crowding(paced, 1) is None, "paced workers compute nothing"


@given(prefill=st.integers(1, 9), decode=st.integers(1, 9), cores=st.integers(1, 64))
def test_equal_shares_are_no_crowd_where_every_worker_has_a_core(prefill: int, decode: int, cores: int) -> None:
    config = ClusterConfig(device="cpu", prefill=PrefillConfig(workers=prefill), decode=DecodeConfig(workers=decode))
    assert (crowding(config, cores) is None) == (prefill + decode <= cores)


def test_routers_need_nodes_with_their_resources() -> None:
    nodes = [{"CPU": 4.0}, {"tandem_entry": 1.0}, {"tandem_entry": 0.3}, {"tandem_entry": 2.0}]
    on_entries = HttpConfig(router_resources={"tandem_entry": 1})
    assert lacks_entries(HttpConfig(), 9, nodes) is None
    assert lacks_entries(on_entries, 3, nodes) is None
    assert lacks_entries(HttpConfig(router_resources={"tandem_entry": 0.1}), 33, nodes) is None
    assert lacks_entries(on_entries, 4, nodes) == (
        "4 routers need {tandem_entry: 1} each, of which the nodes have enough for 3"
    )
    both = HttpConfig(router_resources={"tandem_entry": 1, "other": 1})
    assert (lacks_entries(both, 1, nodes) or "").endswith("enough for 0")
