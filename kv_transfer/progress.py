"""How far a rank's engine has come, told from its thread to the transfer threads, which send what is there.

begin() ──► layer_done(0) ──► layer_done(1) … ──► finish() ──► begin() …

On a GPU "done" means launched, on the device's default stream: an event there marks the place, for which the stream of the
thread that waits here waits in turn.
"""

from __future__ import annotations

import sys
import threading

import torch

from kv_transfer.transport import TransportError

STEP_OVER = 0
"""Number of the step that a lane waits for where all that it sends was computed before: none."""


class StepProgress:
    """How far one rank's engine has come with its steps; the pool lies on `device`. Steps are numbered from 1, and step 0 is
    over.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._launched: torch.cuda.Event | None = None
        """Behind all that was told."""
        self._step = 0
        self._layers_done = sys.maxsize
        self._wanted: list[tuple[int, int]] = []
        self._changed = threading.Condition()

    def begin(self) -> int:
        """Begin a step and return its number. The step before has finished."""
        with self._changed:
            self._step += 1
            self._layers_done = 0
            return self._step

    def layer_done(self, layer: int) -> None:
        """Tell that K and V of this layer are in the pool."""
        with self._changed:
            self._mark()
            self._layers_done = layer + 1
            if (self._step, layer) in self._wanted:  # waking a thread for nothing would take the interpreter from the engine
                self._changed.notify_all()

    def finish(self) -> None:
        """Tell that the step is over, so all of its layers are done."""
        with self._changed:
            self._mark()
            self._layers_done = sys.maxsize
            self._changed.notify_all()

    def wait_for(self, step: int, layer: int, deadline_s: float) -> None:
        """Return when this layer of this step is done. Raises TransportError after `deadline_s` seconds."""
        with self._changed:
            self._wanted.append((step, layer))
            try:
                if not self._changed.wait_for(lambda: (self._step, self._layers_done) > (step, layer), deadline_s):
                    raise TransportError(f"layer {layer} was not computed within {deadline_s:g} s")
            finally:
                self._wanted.remove((step, layer))
            if self._launched is not None:
                self._launched.wait()  # has the current stream wait; the host goes on

    def _mark(self) -> None:
        if self._device.type == "cuda":
            self._launched = torch.cuda.Event()
            self._launched.record(torch.cuda.default_stream(self._device))
