"""How far a rank's engine has come, told from its thread to the transfer threads, which send what is there.

begin() ──► layer_done(0) ──► layer_done(1) … ──► finish() ──► begin() …
"""

from __future__ import annotations

import sys
import threading

from kv_transfer.transport import TransportError


class StepProgress:
    """One per rank. Steps are numbered from 1; step 0 is over."""

    def __init__(self) -> None:
        self._step = 0
        self._layers_done = sys.maxsize
        self._wanted: list[tuple[int, int]] = []
        self._changed = threading.Condition()

    def begin(self) -> int:
        """The number of the step that starts now. The one before has finished."""
        with self._changed:
            self._step += 1
            self._layers_done = 0
            return self._step

    def layer_done(self, layer: int) -> None:
        """K and V of this layer are in the pool."""
        with self._changed:
            self._layers_done = layer + 1
            if (self._step, layer) in self._wanted:  # waking a thread for nothing would take the interpreter from the engine
                self._changed.notify_all()

    def finish(self) -> None:
        """The step is over and its first tokens are on their way."""
        with self._changed:
            self._layers_done = sys.maxsize
            self._changed.notify_all()

    def wait_for(self, step: int, layer: int, deadline_s: float) -> None:
        """Until this layer of this step is done. Raises TransportError after the deadline."""
        with self._changed:
            self._wanted.append((step, layer))
            try:
                if not self._changed.wait_for(lambda: (self._step, self._layers_done) > (step, layer), deadline_s):
                    raise TransportError(f"layer {layer} was not computed within {deadline_s:g} s")
            finally:
                self._wanted.remove((step, layer))
