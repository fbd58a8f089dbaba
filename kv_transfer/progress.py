"""How far a rank's engine has come, told from its thread to the transfer threads, which send what is there.

begin() ──► layer_done(0) ──► layer_done(1) … ──► finish() ──► begin() …

On a GPU the engine launches all layers of a step within milliseconds, and "done" means launched. So behind each layer there is
an event on the device's default stream, and whoever waits for a layer waits for its own event, not for what was launched since:
the first layers leave while the last ones are computed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

from kv_transfer.transport import TransportError

STEP_OVER = 0
"""Number of the step that a lane waits for where all that it sends was computed before: none."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 1e-3


class Mark(Protocol):
    """A place in what a device has been given to do, as a CUDA event marks it."""

    def query(self) -> bool:
        """Whether the device has done everything up to this mark."""


class StepProgress:
    """How far one rank's engine has come with its steps; the pool lies on `device`. Steps are numbered from 1, and step 0 is
    over. `mark` makes a mark behind all that was launched; None stands for what fits the device.
    """

    def __init__(self, device: torch.device, mark: Callable[[], Mark] | None = None) -> None:
        if mark is None and device.type == "cuda":
            mark = _event_maker(device)
        self._mark = mark
        self._layers: list[Mark] = []
        """One behind each layer of this step that was told."""
        self._over: Mark | None = None
        """Behind the latest step that is over."""
        self._step = 0
        self._layers_done = sys.maxsize
        self._wanted: list[tuple[int, int]] = []
        self._changed = threading.Condition()

    def begin(self) -> int:
        """Begin a step and return its number. The step before has finished."""
        with self._changed:
            self._step += 1
            self._layers_done = 0
            self._layers = []
            return self._step

    def layer_done(self, layer: int) -> None:
        """Tell that K and V of this layer are in the pool. Layers are told in order."""
        with self._changed:
            if self._mark is not None:
                self._layers.append(self._mark())
            self._layers_done = layer + 1
            if (self._step, layer) in self._wanted:  # waking a thread for nothing would take the interpreter from the engine
                self._changed.notify_all()

    def finish(self) -> None:
        """Tell that the step is over, so all of its layers are done."""
        with self._changed:
            if self._mark is not None:
                self._over = self._mark()
            self._layers_done = sys.maxsize
            self._changed.notify_all()

    def wait_for(self, step: int, layer: int, deadline_s: float) -> None:
        """Return when this layer of this step is in the pool. Raises TransportError after `deadline_s` seconds."""
        ends = time.monotonic() + deadline_s
        with self._changed:
            self._wanted.append((step, layer))
            try:
                if not self._changed.wait_for(lambda: (self._step, self._layers_done) > (step, layer), deadline_s):
                    raise _late(layer, deadline_s)
            finally:
                self._wanted.remove((step, layer))
            mark = self._layers[layer] if step == self._step and layer < len(self._layers) else self._over
        pause_s = _SHORTEST_PAUSE_S
        while mark is not None and not mark.query():
            if time.monotonic() > ends:
                raise _late(layer, deadline_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _late(layer: int, deadline_s: float) -> TransportError:
    return TransportError(f"layer {layer} was not computed within {deadline_s:g} s")


def _event_maker(device: torch.device) -> Callable[[], Mark]:
    stream = torch.cuda.default_stream(device)

    def mark() -> Mark:
        event: Mark = stream.record_event()
        return event

    return mark
