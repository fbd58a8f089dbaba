"""Which share of a GPU workers reserve by themselves, and what they are told who want more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import gpu_shares
from cluster.commands.lib import foreground
from cluster.commands.lib.interrupts import Interrupts
from cluster.gpu_shares import share, why_left_alone, with_gpu_shares, with_gpus_here
from cluster.memory import computes_on_processor, role_memory
from cluster.ray.placement import Room, pool_of, unplaceable
from configs.loader import load_config
from configs.schema import ClusterConfig, PoolConfig
from protocol.cluster_view import ClusterView
from protocol.errors import ConfigError, InvalidRequestError, UnavailableError
from protocol.messages.workers import Role
from tests.unit.known_models import KNOWN

DRAFT_MODEL = {"method": "draft_model", "model": "smollm2", "num_speculative_tokens": 4}


def nodes(*gpus: int) -> list[dict[str, float]]:
    return [{"CPU": 64.0, "memory": 1e12, **({"GPU": float(number)} if number else {})} for number in gpus]


def gpus_of(config: ClusterConfig) -> list[float | None]:
    return [pool_of(config, role).resources.get("GPU") for role in Role]


def shared(gpus: Sequence[int], **overrides: Any) -> ClusterConfig:
    return with_gpu_shares(load_config(None, overrides), nodes(*gpus))


@pytest.mark.parametrize(
    ("prefill", "decode", "gpus", "expected"),
    [
        (1, 1, [1], 0.5),
        (1, 1, [2], 1.0),
        (1, 1, [8], 1.0),
        (1, 1, [1, 1], 1.0),
        (1, 2, [1], 0.3333),
        (1, 2, [2], 0.5),
        (3, 5, [8], 1.0),
        (3, 6, [8], 0.5),
        (4, 3, [1], 0.1428),
    ],
)
def test_workers_share_the_gpus_evenly(prefill: int, decode: int, gpus: list[int], expected: float) -> None:
    config = shared(gpus, **{"prefill.workers": prefill, "decode.workers": decode})
    assert gpus_of(config) == [expected, expected]
    assert config.unlike is None, "workers can change their roles"
    assert not any(computes_on_processor(config, pool_of(config, role)) for role in Role)


def test_a_colocated_worker_has_the_gpu_to_itself() -> None:
    assert gpus_of(shared([1], disaggregation="never")) == [1.0, 1.0]


def test_sizes_that_the_autoscaler_may_reach_have_shares() -> None:
    ranges = {"autoscale.sizes": "prefill=1..2,decode=0..4"}
    assert gpus_of(shared([1], **ranges)) == [0.1666, 0.1666]
    assert gpus_of(shared([1], **ranges, **{"autoscale.standby": 2})) == [0.125, 0.125]
    assert gpus_of(shared([1], **ranges, **{"autoscale.max_workers": 4})) == [0.25, 0.25]
    assert gpus_of(shared([1], **ranges, **{"autoscale.max_workers": 4, "autoscale.standby": 1})) == [0.2, 0.2]
    assert gpus_of(shared([6], **ranges)) == [1.0, 1.0]


@pytest.mark.parametrize(
    "overrides",
    [
        {"device": "cpu"},
        {"engine": "paced"},
        {"transport": "gloo"},
        {"transport": "shared_memory"},
        {"prefill.resources": {"GPU": 0.3}},
        {"prefill.resources": {"GPU": 1.0}, "decode.resources": {"GPU": 1.0, "fast": 1.0}, "device": "cuda"},
        {"decode.resources": {"CPU": 65.0}},
    ],
)
def test_what_names_no_gpu_or_computes_on_processors_stays_as_it_is(overrides: dict[str, Any]) -> None:
    config = load_config(None, overrides)
    assert with_gpu_shares(config, nodes(8)) is config


def test_without_gpus_auto_stays_and_cuda_is_refused() -> None:
    config = load_config(None, {})
    assert with_gpu_shares(config, nodes(0, 0)) is config
    assert with_gpu_shares(config, []) is config
    assert computes_on_processor(config, config.decode)
    with pytest.raises(ConfigError, match="device: cuda needs a GPU, and there is none") as caught:
        shared([0, 0], device="cuda")
    assert caught.value.param == "device"


@pytest.mark.parametrize(("gpus", "transport"), [([], "auto"), ([0, 0], "auto"), ([8], "gloo")])
def test_float16_needs_gpus(gpus: list[int], transport: str) -> None:
    with pytest.raises(ConfigError, match="float16 is for GPUs, and workers compute on processors here") as caught:
        shared(gpus, dtype="float16", transport=transport)
    assert caught.value.param == "dtype"
    assert gpus_of(shared([2], dtype="float16")) == [1.0, 1.0]
    assert gpus_of(shared(gpus, dtype="float16", engine="paced")) == [None, None]


@pytest.mark.parametrize(
    ("gpus", "settings", "param"),
    [
        ([], {"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ([2], {"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
        ([2], {"speculative_config": DRAFT_MODEL}, "speculative_config.method"),
    ],
)
def test_what_can_not_be_where_workers_compute_is_refused(gpus: list[int], settings: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError, match=r"workers (compute on processors|share the GPUs) here: use") as caught:
        shared(gpus, **settings)
    assert caught.value.param == param
    with_gpus = not gpus
    assert gpus_of(shared([2] if with_gpus else [], **settings)) == [1.0 if with_gpus else None] * 2


def test_other_resources_are_kept_and_count() -> None:
    """Decode workers are tied to a node with one of the two GPUs, so that three have to share it."""
    config = load_config(None, {"decode.workers": 3, "prefill.workers": 1, "decode.resources": {"big": 1.0}})
    there = [{"CPU": 8.0, "GPU": 1.0}, {"CPU": 8.0, "GPU": 1.0, "big": 8.0}]
    sharing = with_gpu_shares(config, there)
    assert (sharing.prefill.resources, sharing.decode.resources) == ({"GPU": 0.3333}, {"big": 1.0, "GPU": 0.3333})
    assert with_gpu_shares(config, [{"CPU": 8.0, "GPU": 1.0}, {"CPU": 8.0, "big": 8.0}]) is config


@settings(max_examples=400)
@given(
    st.integers(0, 12),
    st.integers(1, 40),
    st.lists(st.integers(0, 8), min_size=1, max_size=5).filter(any),
    st.sampled_from(["auto", "cuda"]),
)
def test_all_workers_fit_and_a_larger_share_would_not_do(prefill: int, decode: int, gpus: list[int], device: str) -> None:
    overrides = {"device": device, "decode.workers": decode}
    overrides |= {"prefill.workers": prefill} if prefill else {"disaggregation": "never"}
    config = shared(gpus, **overrides)
    each = config.decode.resources["GPU"]
    assert gpus_of(config) == [each, each]
    assert each == round(each * 10_000) / 10_000
    assert unplaceable(config, nodes(*gpus)) is None
    assert int(1 / each) * sum(gpus) >= prefill + decode, "each share lies on one GPU"
    if each < 1:
        fewer_on_each = -(-(prefill + decode) // sum(gpus)) - 1
        assert fewer_on_each * sum(gpus) < prefill + decode
        assert share(fewer_on_each) > each
    assert with_gpu_shares(config, nodes(*gpus)) is config, "shares that are there stay"


@given(st.integers(1, 2112))
def test_shares_of_a_gpu_do_not_exceed_it(on_each: int) -> None:
    units = round(share(on_each) * 10_000)
    assert 0 < units * on_each <= 10_000
    assert share(on_each) == units / 10_000


@pytest.mark.parametrize(
    ("resources", "utilization", "expected"),
    [({}, 0.9, 0.9), ({"GPU": 1.0}, 0.9, 0.9), ({"GPU": 2.0}, 0.9, 0.9), ({"GPU": 0.5}, 0.9, 0.45), ({"GPU": 0.3}, 1.0, 0.3)],
)
def test_a_worker_uses_its_share_of_the_memory(resources: dict[str, float], utilization: float, expected: float) -> None:
    config = ClusterConfig(gpu_memory_utilization=utilization)
    assert config.gpu_memory_share(PoolConfig(resources=resources)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("device", "resources", "expected"),
    [
        ("auto", {}, "cpu"),
        ("auto", {"GPU": 0.5}, "auto"),
        ("cuda", {}, "cuda"),
        ("cuda", {"GPU": 1.0}, "cuda"),
        ("cpu", {"GPU": 1.0}, "cpu"),
    ],
)
def test_a_worker_without_a_gpu_computes_on_the_processor(device: Any, resources: dict[str, float], expected: str) -> None:
    assert ClusterConfig(device=device).device_of(PoolConfig(resources=resources)) == expected


def test_who_scales_beyond_the_shares_is_told_so() -> None:
    config = shared([1])
    room = Room(config, role_memory(config, KNOWN["Qwen/Qwen3-0.6B"]), nodes(1), may_grow=False)
    room.check({Role.PREFILL: 1, Role.DECODE: 1}, [Role.DECODE])
    with pytest.raises(InvalidRequestError) as refused:
        room.check({Role.PREFILL: 1, Role.DECODE: 3}, [Role.DECODE])
    assert refused.value.message == (
        "decode: 3 workers do not fit: there is room for at most 1 beside 1 prefill; each reserves {GPU: 0.5} on one node, and "
        "the nodes have {GPU: 1}; smaller shares of a GPU need a new start: with more workers, a range in autoscale.sizes, or "
        "other resources"
    )


def test_memory_is_blamed_where_it_is_short_first() -> None:
    config = shared([1], **{"decode.workers": 3})
    small = [{"CPU": 8.0, "GPU": 1.0, "memory": 0.7e9}]
    room = Room(config, role_memory(config, KNOWN["Qwen/Qwen3-0.6B"]), small, may_grow=False)
    with pytest.raises(
        InvalidRequestError, match=r"at most 1 beside 1 prefill; each takes 0.3 GB .*memory for workers is 0.7 GB"
    ):
        room.check({Role.PREFILL: 1, Role.DECODE: 9}, [Role.DECODE])


@pytest.mark.parametrize("built", [True, False])
def test_the_gpus_of_this_machine(monkeypatch: pytest.MonkeyPatch, built: bool) -> None:
    monkeypatch.setattr(gpu_shares, "num_gpus", lambda: 1)
    monkeypatch.setattr(gpu_shares, "_torch_has_cuda", lambda: built)
    auto = load_config(None, {})
    if built:
        assert gpus_of(with_gpus_here(auto)) == [0.5, 0.5]
        assert why_left_alone(auto) is None
        assert why_left_alone(load_config(None, {"transport": "gloo"})) == "transport: gloo is for processors alone"
    else:
        assert with_gpus_here(auto) is auto
        assert why_left_alone(auto) == "the torch that is installed here is built without CUDA"
        with pytest.raises(ConfigError, match="device: cuda computes on GPUs, and the torch that is installed here"):
            with_gpus_here(load_config(None, {"device": "cuda"}))
    assert why_left_alone(load_config(None, {"device": "cpu"})) is None


def test_a_machine_without_gpus_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_shares, "num_gpus", lambda: None)
    config = load_config(None, {})
    assert with_gpus_here(config) is config
    assert why_left_alone(config) is None
    with pytest.raises(ConfigError, match="there is none"):
        with_gpus_here(load_config(None, {"device": "cuda"}))


@pytest.mark.parametrize(
    ("address", "overrides", "told"),
    [
        ("auto", {}, True),
        ("auto", {"device": "cpu"}, False),
        ("auto", {"prefill.resources": {"GPU": 0.5}, "decode.resources": {"GPU": 0.5}}, False),
        (None, {}, False),
    ],
)
def test_a_cluster_that_joined_nodes_without_gpus_says_so(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    address: str | None,
    overrides: dict[str, Any],
    told: bool,
) -> None:
    """Nodes with GPUs may have been on their way."""

    class Ended:
        def __init__(self, config: ClusterConfig) -> None:
            self.config = config

        def watch(self, known_version: int) -> ClusterView:
            raise UnavailableError("it ended")

    @contextmanager
    def running(config: ClusterConfig, *_: object) -> Iterator[Ended]:
        yield Ended(config)

    monkeypatch.setattr(gpu_shares, "num_gpus", lambda: None)
    monkeypatch.setattr(Interrupts, "install", lambda _: None)
    monkeypatch.setattr(foreground, "check_own_http", lambda _: None)
    monkeypatch.setattr(foreground, "measured_profiles", lambda *_: {})
    monkeypatch.setattr(foreground, "running_cluster", running)
    with pytest.raises(UnavailableError, match="it ended"):
        foreground.serve_until_interrupted(load_config(None, overrides), address)
    line = "workers compute on the processor, not on a GPU: no node had one that they can use when the cluster began"
    assert (line in capsys.readouterr().err.splitlines()) is told


def test_how_torch_was_built_is_known_without_importing_it() -> None:
    import torch

    assert gpu_shares._torch_has_cuda() == (torch.version.cuda is not None)


def test_each_rank_of_a_worker_gets_a_gpu_of_its_own() -> None:
    """NCCL takes no GPU twice. Where there are too few, workers stay on the processors."""
    config = load_config(None, {"prefill.tensor_parallel_size": 3, "decode.tensor_parallel_size": 3})
    assert with_gpu_shares(config, nodes(6)).decode.resources["GPU"] == 1.0
    assert with_gpu_shares(config, nodes(5)) is config
