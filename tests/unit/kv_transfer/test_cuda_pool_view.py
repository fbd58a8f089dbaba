"""What the handoff does in a GPU's memory, by Triton's interpreter, against the same by torch's operators."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels.triton.launch import Launch
from kv_transfer import cuda_pool_view
from kv_transfer.cuda_pool_view import CudaPoolView
from kv_transfer.fingerprints.device import MultilinearFingerprints
from kv_transfer.plan import Piece, SlotRun
from kv_transfer.pool_view import PoolView, Slots

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # where Triton interprets
LAYERS, HEADS, HEAD_DIM = 4, 4, 16


def pool(num_slots: int, seed: int, heads: int = HEADS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LAYERS, 2, num_slots, heads, HEAD_DIM, generator=generator).to(DEVICE, torch.bfloat16)


def views(content: Tensor, heads: range | None) -> tuple[CudaPoolView, PoolView]:
    """Two copies of a pool."""
    return CudaPoolView(content.clone().unbind(0), heads), PoolView(content.clone().unbind(0), heads)


def equal(one: PoolView, other: PoolView) -> bool:
    """Over the whole pool, other heads included."""
    return all(
        torch.equal(a, b) for a, b in zip((whole(view) for view in one.layers), (whole(v) for v in other.layers), strict=True)
    )


def whole(layer: Tensor) -> Tensor:
    return torch.empty(0, dtype=layer.dtype, device=layer.device).set_(layer.untyped_storage())


SLOTS = st.permutations(range(20)).map(lambda order: Slots([SlotRun(slot, 1) for slot in order[:11]], DEVICE))
HEAD_RANGES = st.sampled_from([range(0, 4), range(0, 1), range(1, 3), range(3, 4)])
LAYER_RANGES = st.sampled_from([range(0, 4), range(1, 2), range(2, 4)])


@settings(max_examples=20)
@given(mine=SLOTS, theirs=SLOTS, heads=HEAD_RANGES, layers=LAYER_RANGES)
def test_tokens_are_copied_from_a_foreign_pool(mine: Slots, theirs: Slots, heads: range, layers: range) -> None:
    """Of another size, some of whose heads are this one's."""
    source = PoolView(pool(24, seed=1).unbind(0), heads)
    for ours, reference in (views(pool(20, seed=2, heads=len(heads)), None),):
        for view in (ours, reference):
            view.copy_in(source.layers, theirs.ids_T, layers, mine)
        assert equal(ours, reference)


@settings(max_examples=20)
@given(slots=SLOTS, heads=HEAD_RANGES, layers=LAYER_RANGES)
def test_tokens_go_through_a_dense_buffer(slots: Slots, heads: range, layers: range) -> None:
    ours, reference = views(pool(20, seed=3), heads)
    shape = (len(layers), 2, len(slots), len(heads), HEAD_DIM)
    gathered = [torch.full(shape, torch.nan, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    for view, into in zip((ours, reference), gathered, strict=True):
        view.gather(layers, slots, into)
    assert torch.equal(*gathered)
    for view in (ours, reference):
        view.scatter(layers, slots, -gathered[0])
    assert equal(ours, reference)
    assert not torch.equal(ours.layers[layers.start], pool(20, seed=3)[layers.start, :, :, heads.start : heads.stop])


def test_nothing_is_copied_to_compile() -> None:
    ours, reference = views(pool(20, seed=4), None)
    ours.copy_in(pool(9, seed=5).unbind(0), Slots((), DEVICE).ids_T, range(1), Slots((), DEVICE))
    ours.compile()
    assert equal(ours, reference)


@pytest.mark.parametrize("heads", [None, range(1, 3)], ids=["all heads", "some heads"])
def test_lanes_launch_nothing_that_was_not_compiled(heads: range | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the constants that a kernel is compiled for."""
    seen: set[tuple[object, ...]] = set()
    monkeypatch.setattr(Launch, "run", lambda one: seen.add((one.kernel.fn.__name__, *sorted(one.constants.items()))))
    view, slots = views(pool(20, seed=7), heads)[0], Slots([SlotRun(3, 5)], DEVICE)
    view.compile()
    compiled = set(seen)
    seen.clear()
    view.copy_in(view.layers, slots.ids_T, range(1, 4), slots)
    dense = view.layers[0].new_empty((3, 2, 5, *view.layers[0].shape[2:]))
    view.gather(range(1, 4), slots, dense)
    view.scatter(range(0, 3), slots, dense)
    push = MultilinearFingerprints(view, [[Piece(0, 3, 5)]])
    push.update(range(4))
    assert len(seen) == 4
    assert seen == compiled


def test_lanes_at_once_have_streams_of_their_own_however_many_there_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch hands its 32 streams out in turn."""
    in_turn = itertools.cycle([object() for _ in range(32)])
    given: list[object] = []
    monkeypatch.setattr(cuda_pool_view, "_STREAMS", cuda_pool_view.LaneStreams())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(in_turn))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_stream", given.append)
    lasting, content = views(pool(4, seed=8), None)[0], pool(4, seed=9)
    lasting.begin_thread()
    for _ in range(40):
        two = [views(content, None)[0] for _ in range(2)]
        for view in two:
            view.begin_thread()
        assert len({given[0], *given[-2:]}) == 3
        for view in (*two, two[0]):
            view.end_thread()
    assert len(set(given)) == 3


def test_rows_that_do_not_follow_each_other_are_no_pool() -> None:
    layers = pool(8, seed=6).unbind(0)
    with pytest.raises(AssertionError, match="layers one behind the other"):
        CudaPoolView([layers[0], layers[2]])
