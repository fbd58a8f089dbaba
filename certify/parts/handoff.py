"""The part `handoff`: every transport that is possible here, between two processes.

KV arrives as it was sent, also layer by layer from an engine that is still computing. A peer that is killed and one that is
stopped break their lane within its deadline, and nothing else. The time of a large push stands beside the GPU's own copy.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time

import torch
from torch import Tensor

from certify.ceilings import ceilings
from certify.findings import Device, Findings, PartSkipped
from certify.handoff_scene import Case, PoolShape, Scene, scene, tokens
from kv_transfer.fingerprints.pushes import DIGEST_BYTES
from kv_transfer.progress import STEP_OVER
from kv_transfer.transport import TransportError
from kv_transfer.transports.nccl_library import find_nccl
from protocol.errors import TransportUnavailableError
from protocol.gang import HeadMove, TokenSpan

DEADLINE_S = 3.0
LATE_S = 5.0
"""Seconds after the deadline within which a broken lane must have said so."""
SMALL = PoolShape(layers=4, blocks=256, block_size=16, heads=4, head_dim=128, move=HeadMove(0, 0, 1, 0, 2))
"""Some of prefill's heads become some of decode's."""
LARGE = PoolShape(layers=32, blocks=512, block_size=16, heads=8, head_dim=128, move=HeadMove(0, 0, 0, 0, 8))
"""The KV of 8,192 tokens of an 8B model: 1.07 GB."""
MINE, THEIRS, COUNT = range(200, 100, -1), range(3, 103), 1590
"""Blocks of both sides, and tokens of a push between small pools."""
ROUNDS = 5
SLOW_LAYER_S = 0.01
"""What a processor that stands for an engine takes for a layer."""
NCCL = 21_400
"""The oldest version that Tandem talks to."""


def run(findings: Findings, device: Device) -> None:
    """Try each transport in turn."""
    cases, impossible = cases_of(device)
    for name, why in impossible.items():
        findings.row("Not tried", {"transport": name, "why": why})
    if not cases:
        raise PartSkipped("no transport is possible here")
    copy_bytes_per_s = ceilings(torch.device(device)).bytes_per_s
    for case in cases:
        try:
            asyncio.run(push_content(findings, case))
            asyncio.run(push_much(findings, case, copy_bytes_per_s))
        except (TransportError, TransportUnavailableError) as error:
            findings.check(f"{case}: a lane", passed=False, detail=str(error))


def cases_of(device: Device) -> tuple[list[Case], dict[str, str]]:
    """Return the transports that are possible on this machine, and why others are not."""
    if device == "cpu":
        return [Case("shared_memory", "cpu", "cpu"), Case("gloo", "cpu", "cpu")], {}
    library, count = find_nccl(), torch.cuda.device_count()
    version = 0 if library is None else library.version
    decodes = ["cuda:0"] if count < 2 else ["cuda:0", "cuda:1"]
    impossible = {"between two GPUs": "there is one"} if count < 2 else {}
    cases = [Case("cuda_ipc", "cuda:0", decode) for decode in decodes]
    if version >= NCCL:
        cases += [Case("nccl", "cuda:0", decode) for decode in decodes]
    else:
        impossible["nccl"] = f"needs NCCL 2.14; here is {version or 'none'}"
    return cases, impossible


async def push_content(findings: Findings, case: Case) -> None:
    """Push once while a slow engine computes and once more from a pool that is complete; then kill the peer."""
    async with scene(case, SMALL, DEADLINE_S) as it:
        generator = torch.Generator().manual_seed(1)
        content = torch.randn(it.source.shape, generator=generator).to(it.source)
        spans = [it.span(MINE, COUNT)], [it.span(THEIRS, COUNT)]
        step = it.progress.begin()
        pushing = asyncio.create_task(it.push(step, *spans))
        await asyncio.sleep(0)
        for layer in range(SMALL.layers):
            if it.source.is_cuda:
                torch.cuda._sleep(100_000_000)  # some 50 ms of the device's time, none of the host's
            it.source[layer].copy_(content[layer])
            it.progress.layer_done(layer)
        it.progress.finish()
        await _check_content(findings, f"{case}, engine computing", it, content, await pushing)
        await _check_content(findings, f"{case}, engine done", it, content, await it.push(STEP_OVER, *spans))
        it.decode.kill()
        it.decode.join(DEADLINE_S)
        await _breaks(findings, f"{case}: a killed peer breaks the lane", it)


async def _check_content(
    findings: Findings, name: str, it: Scene, content: Tensor, digests: tuple[list[bytes], list[bytes]]
) -> None:
    sent, arrived = digests
    data = await it.received()
    received, expected = tokens(data, SMALL, THEIRS, COUNT), tokens(content, SMALL, MINE, COUNT)
    others = data.view(SMALL.layers, 2, SMALL.blocks, -1)[:, :, [block for block in range(SMALL.blocks) if block not in THEIRS]]
    findings.check(f"{name}: fingerprints of both sides agree", sent == arrived and len(sent[0]) == len(MINE) * DIGEST_BYTES)
    findings.check(f"{name}: KV arrives whole", torch.equal(received[:, :, :, :2], expected[:, :, :, 1:3]))
    findings.check(f"{name}: nothing else is written", not others.any() and not data[..., 2:, :].any())


async def push_much(findings: Findings, case: Case, copy_bytes_per_s: float) -> None:
    """Push as much as a long prompt has, several times; then stop the peer in the middle."""
    async with scene(case, LARGE, DEADLINE_S) as it:
        it.source.normal_()
        count = LARGE.blocks * LARGE.block_size
        table = torch.randperm(LARGE.blocks, generator=torch.Generator().manual_seed(2)).tolist()
        spans = [it.span(table, count)], [it.span(list(range(LARGE.blocks)), count)]
        await _overlap(findings, case, it, spans)
        taken = []
        for _ in range(ROUNDS + 1):
            began = time.monotonic()
            sent, arrived = await it.push(STEP_OVER, *spans)
            taken.append(time.monotonic() - began)
            if sent != arrived:
                findings.check(f"{case}: fingerprints of a large push agree", passed=False)
        num_bytes, seconds = count * LARGE.token_bytes, statistics.median(taken[1:])
        findings.row(
            "A push of 8,192 tokens of an 8B model, both sides' fingerprints included",
            {
                "transport": str(case),
                "GB": num_bytes / 1e9,
                "ms": seconds * 1e3,
                "first time, ms": taken[0] * 1e3,
                "GB/s": num_bytes / seconds / 1e9,
                "of a copy within the device": f"{2 * num_bytes / seconds / copy_bytes_per_s:.0%}",
            },
        )
        assert it.decode.pid is not None, "it was started"
        os.kill(it.decode.pid, signal.SIGSTOP)
        try:
            await _breaks(findings, f"{case}: a stopped peer breaks the lane", it)
        finally:
            it.decode.kill()
            it.decode.join(DEADLINE_S)


async def _overlap(findings: Findings, case: Case, it: Scene, spans: tuple[list[TokenSpan], list[TokenSpan]]) -> None:
    """Push while an engine computes layer by layer, and note when each message left."""
    left_at: list[float] = []
    wait_for = it.progress.wait_for

    def noted(step: int, layer: int, deadline_s: float) -> None:
        wait_for(step, layer, deadline_s)
        left_at.append(time.monotonic())

    it.progress.wait_for = noted  # type: ignore[method-assign]
    step, began = it.progress.begin(), time.monotonic()
    pushing = asyncio.create_task(it.push(step, *spans))
    for layer in range(it.shape.layers):
        if it.source.is_cuda:
            torch.cuda._sleep(20_000_000)  # some 10 ms of the device's time, none of the host's
        await asyncio.sleep(0 if it.source.is_cuda else SLOW_LAYER_S)
        it.progress.layer_done(layer)
    if it.source.is_cuda:
        await asyncio.to_thread(torch.cuda.synchronize)
    computed_at = time.monotonic()
    it.progress.finish()
    sent, arrived = await pushing
    it.progress.wait_for = wait_for  # type: ignore[method-assign]
    findings.check(f"{case}: fingerprints of layers that left one after the other agree", sent == arrived)
    findings.check(
        f"{case}: the first layers leave while later ones are computed",
        left_at[0] - began < (computed_at - began) / 2,
        f"messages left after {', '.join(f'{1e3 * (at - began):.0f}' for at in left_at)} ms, "
        f"the last layer was computed after {1e3 * (computed_at - began):.0f}, all had arrived after "
        f"{1e3 * (time.monotonic() - began):.0f}",
    )


async def _breaks(findings: Findings, name: str, it: Scene) -> None:
    """Send more than any buffer takes, and see that it fails in time."""
    began = time.monotonic()
    blocks = list(range(it.shape.blocks))
    try:
        await it.lane.send(STEP_OVER, [it.span(blocks, len(blocks) * it.shape.block_size)])
    except TransportError as error:
        seconds = time.monotonic() - began
        findings.check(name, seconds < DEADLINE_S + LATE_S, f"after {seconds:.1f} s: {error}")
    else:
        findings.check(name, passed=False, detail="the push came to its end")
