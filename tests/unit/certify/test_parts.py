"""What the parts of `tandem certify` make of a machine, as far as that takes no GPU."""

from __future__ import annotations

import multiprocessing
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from certify import handoff_scene
from certify.findings import Content, Device, Findings, PartSkipped
from certify.given_sequence import Computed
from certify.parts import cluster, handoff, kernels, peer, ranks, steps
from certify.parts.exactness import compared
from certify.shapes import TINY
from configs.loader import load_config
from engine.batch import SampledToken
from engine.gpu_checks import Gpu
from protocol.sampling import TokenLogprobs


@pytest.mark.parametrize(("num_gpus", "prefill", "decode"), [(1, 0.3, 0.3), (2, 1.0, 0.5), (3, 1.0, 1.0), (8, 1.0, 1.0)])
def test_workers_share_the_gpus_that_there_are(num_gpus: int, prefill: float, decode: float, tmp_path: Path) -> None:
    config = cluster.configuration(tmp_path, "cuda", cluster.SCALES["cuda"], num_gpus)
    loaded = load_config(None, config)
    assert loaded.prefill.resources == {"GPU": prefill}
    assert loaded.decode.resources == {"GPU": decode}
    assert (loaded.prefill.workers, loaded.decode.workers) == (1, 2)
    assert prefill + 2 * decode <= num_gpus


@pytest.mark.parametrize(
    ("num_gpus", "version", "tried", "not_tried"),
    [
        (1, None, ["cuda_ipc-cuda:0-cuda:0"], ["between two GPUs", "nccl"]),
        (1, 22_703, ["cuda_ipc-cuda:0-cuda:0", "nccl-cuda:0-cuda:0"], ["between two GPUs"]),
        (
            2,
            22_703,
            ["cuda_ipc-cuda:0-cuda:0", "cuda_ipc-cuda:0-cuda:1", "nccl-cuda:0-cuda:0", "nccl-cuda:0-cuda:1"],
            [],
        ),
    ],
)
def test_the_transports_that_are_possible(
    num_gpus: int, version: int | None, tried: list[str], not_tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = None if version is None else types.SimpleNamespace(version=version)
    monkeypatch.setattr(handoff, "find_nccl", lambda: library)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    cases, impossible = handoff.cases_of("cuda")
    assert [str(case) for case in cases] == tried
    assert list(impossible) == not_tried


@pytest.mark.parametrize("says", [[], ["ready"], ["ready", ("taken", b"answer")]], ids=["loading", "answering", "receiving"])
def test_a_receiving_process_that_ends_costs_the_checks_of_its_transport_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: list[object]
) -> None:
    """Also where the lane is connected, which here is one that sends nothing."""

    class Connected(types.SimpleNamespace):
        async def connect(self, _: object, __: str, exchange: Any) -> types.SimpleNamespace:
            assert await exchange(b"offer") == b"answer"
            return types.SimpleNamespace(send=self.nothing, close=self.nothing)

        async def nothing(self, *_: object) -> list[bytes]:
            return []

    def ends(told: Any, *_: object) -> None:
        for each in says:
            told.send(each)
            told.recv()

    monkeypatch.setattr(handoff_scene, "SPAWN", multiprocessing.get_context("fork"))
    monkeypatch.setattr(handoff_scene, "LocalSendRank", lambda *_: Connected())
    monkeypatch.setattr(handoff_scene, "decode_process", ends)
    monkeypatch.setattr(handoff, "ceilings", lambda _: types.SimpleNamespace(bytes_per_s=1.0))
    handoff.run(Findings(tmp_path / "found"), "cpu")
    assert [(check.name, check.passed, check.detail) for check in Content.read(tmp_path / "found").checks] == [
        (f"{transport}-cpu-cpu: a lane", False, "the receiving process ended") for transport in ("shared_memory", "gloo")
    ]


def test_every_group_of_kernels_has_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    machines: list[tuple[Device, tuple[int, int]]] = [("cuda", (8, 6)), ("cuda", (8, 9)), ("cpu", (0, 0))]
    for device, capability in machines:
        monkeypatch.setattr(kernels, "current_gpu", lambda capability=capability: Gpu("", capability, 0))
        found = kernels.groups(device)
        assert any(group.kernel == "KV in fp8" for group in found) == (capability == (8, 9)), "older ones have no such numbers"
        assert len({str(group) for group in found}) == len(found)
        for group in found:
            cases = list(kernels.cases(group, kernels.SIZES[device]))
            assert cases, group
            assert len({case.name for case in cases}) == len(cases), "cases can be told apart"
            assert any("window" in case.name for case in cases) == ("attention" in group.kernel)


@pytest.mark.slow
def test_a_group_whose_process_dies_is_a_failed_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "group_process", abort)
    kernels._run_group(Findings(tmp_path / "found"), kernels.Group("sampling", torch.float32), "cpu")
    content = Content.read(tmp_path / "found")
    (check,) = content.checks
    assert (check.passed, check.detail) == (False, "its process ended with SIGABRT after 1 cases")
    assert len(content.tables["Errors against a reference"]) == 1


def abort(told: Any, group: kernels.Group, device: str) -> None:
    """What a process of kernels might do."""
    import os

    told.send(("first", 0.0, 1.0))
    os.abort()


def test_a_case_that_raises_and_one_that_is_wrong_fail_their_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for says in (raises_one, says_nan):
        monkeypatch.setattr(kernels, "group_process", says)
        path = tmp_path / says.__name__
        kernels._run_group(Findings(path), kernels.Group("sampling", torch.float32), "cpu")
        (check,) = Content.read(path).checks
        assert not check.passed
        assert check.detail.startswith("bad: ")


def raises_one(told: Any, group: kernels.Group, device: str) -> None:
    told.send(("good", 0.0, 1.0))
    told.send(("bad", "AcceleratorError: illegal", 1.0))


def says_nan(told: Any, group: kernels.Group, device: str) -> None:
    told.send(("bad", float("nan"), 1.0))
    told.send(("good", 0.0, 1.0))


def test_a_gpu_that_is_too_small_for_one_layer_skips_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 * 10**9, 4 * 10**9))
    with pytest.raises(PartSkipped, match="3 GB hold no layer"):
        steps._fitting_shape("cuda", torch.bfloat16, 262_144)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.slow
def test_ranks_that_fail_are_a_failed_check(tmp_path: Path) -> None:
    """Here for want of a GPU."""
    found = tmp_path / "found"
    ranks.check_ranks(Findings(found), TINY, tmp_path / "store")
    [check] = Content.read(found).checks
    assert not check.passed
    assert "rank 0: " in check.detail


def computed(kv: torch.Tensor, *logprobs: float) -> Computed:
    return Computed(kv, [SampledToken(7, TokenLogprobs(chosen, ())) for chosen in logprobs])


def test_differences_are_counted() -> None:
    kv = torch.zeros(2, 2, 5, 1, 4)
    other = kv.clone()
    other[1, 0, 3, 0, 2] = 0.5
    row = compared(computed(kv, -1.0, -2.0, -3.0), computed(other, -3.25))
    assert row == {
        "KV: same bits": False,
        "tokens with the same KV": 4,
        "of": 5,
        "KV: largest difference": 0.5,
        "logprobs: same bits": False,
        "largest difference": 0.25,
        "same likeliest tokens": "1 of 1",
    }
    assert compared(computed(kv, -1.0), computed(kv, -1.0))["KV: same bits"] is True


class FakeVllm:
    """An engine that computes at most two prompts a step and gives every other sequence a token."""

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}
        self._limits: dict[str, int] = {}

    def add_request(self, name: str, prompt: Mapping[str, Any], sampling: Any) -> None:
        self._lengths[name], self._limits[name] = 0, sampling.max_tokens

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self._lengths.pop(name, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self._lengths)

    def step(self) -> list[Any]:
        waiting = [name for name, length in self._lengths.items() if not length]
        done = []
        for name in waiting[:2] or list(self._lengths):
            self._lengths[name] += 1
            tokens = [0] * self._lengths[name]
            done.append(types.SimpleNamespace(request_id=name, outputs=[types.SimpleNamespace(token_ids=tokens)]))
            if len(tokens) == self._limits[name]:
                del self._lengths[name]
        return done


def test_the_peer_is_driven_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    fake = FakeVllm()
    engine = peer.Engine(fake, lambda **options: types.SimpleNamespace(**options))
    assert engine.prefill_s(100) > 0
    assert engine.decode_s(5, 64) > 0
    assert not fake.has_unfinished_requests()
