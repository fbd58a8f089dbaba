"""A layer may leave when its own work is done, on a device that computes long after everything was launched."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from kv_transfer.plan import layer_groups
from kv_transfer.progress import StepProgress
from kv_transfer.transport import TransportError

CPU = torch.device("cpu")
LAYERS = 8


@dataclass
class Device:
    """Does what it was given in order, a piece whenever it is told to."""

    launched: int = 0
    done: int = 0

    def launch(self) -> None:
        self.launched += 1

    def mark(self) -> Mark:
        return Mark(self, self.launched)


@dataclass
class Mark:
    device: Device
    place: int

    def query(self) -> bool:
        return self.device.done >= self.place


def test_each_group_leaves_at_the_end_of_its_own_last_layer() -> None:
    """All layers are launched at once; the device then computes one after the other."""
    device = Device()
    progress = StepProgress(CPU, device.mark)
    step = progress.begin()
    left: list[tuple[int, int]] = []
    over = threading.Event()

    def send() -> None:
        for group in layer_groups(LAYERS, 1, 2):
            progress.wait_for(step, group[-1], 10.0)
            left.append((group[-1], device.done))
        over.set()

    with ThreadPoolExecutor(1) as lane:
        sending = lane.submit(send)
        for layer in range(LAYERS):
            device.launch()
            progress.layer_done(layer)
        for computed in range(1, LAYERS + 1):
            device.done = computed
            ends = time.monotonic() + 5
            while computed % 2 == 0 and len(left) < computed // 2 and time.monotonic() < ends:
                time.sleep(0.001)
        assert over.wait(5)
        sending.result(1)
    assert left == [(last, last + 1) for last in range(1, LAYERS, 2)]


def test_a_step_that_is_over_is_waited_for_on_the_device_too() -> None:
    """The host has launched all of it, and perhaps the next step."""
    device = Device()
    progress = StepProgress(CPU, device.mark)
    first = progress.begin()
    device.launch()
    progress.layer_done(0)
    progress.finish()
    with pytest.raises(TransportError, match=r"layer 0 was not computed within 0\.02 s"):
        progress.wait_for(first, 0, 0.02)
    progress.begin()
    device.launch()
    device.done = 1
    progress.wait_for(first, 0, 0.5)
    progress.layer_done(0)
    progress.wait_for(first, 0, 0.5)  # what the next step has launched since is not waited for
    progress.finish()


def test_nothing_is_marked_where_done_means_done() -> None:
    progress = StepProgress(CPU)
    step = progress.begin()
    with pytest.raises(TransportError, match="not computed"):
        progress.wait_for(step, 0, 0.02)
    progress.layer_done(0)
    progress.wait_for(step, 0, 0.5)
    with pytest.raises(TransportError, match="layer 1"):
        progress.wait_for(step, 1, 0.02)
    progress.finish()
    progress.wait_for(step, 1, 0.5)
