"""What a worker's GPUs tell of themselves by NVML, for /metrics. Imported only where a worker computes on a GPU.

    made ──► started: a thread reads the GPUs every few seconds ──► reports: the latest reading ──► closed

CUDA numbers the GPUs that this process may use, and NVML those of the node. A UUID names the same GPU to both.

Nothing here disturbs the worker. What NVML does not tell is None, and the log says why, once. A call of NVML may hang with a
broken GPU: the thread is a daemon, nobody waits for it, and a reading counts for STALE_S seconds only.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from protocol.messages.load import GpuReport

log = logging.getLogger(__name__)

READ_EVERY_S = 5.0
STALE_S = 20.0
_MOST_EVENTS = 100
"""XID errors of one GPU that one reading takes. Further ones wait for the next reading."""
_EVENT_WAIT_MS = 1


class GpuWatch:
    """Reads the GPUs with these UUIDs again and again, in a thread of its own."""

    def __init__(self, uuids: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._uuids = uuids
        self._clock = clock
        self._latest: tuple[GpuReport, ...] = ()
        self._stale_at = float("-inf")
        self._closed = threading.Event()

    @property
    def reports(self) -> tuple[GpuReport, ...]:
        """One report for each GPU that NVML finds, from the latest reading. Empty if that is too old, or there is none."""
        return self._latest if self._clock() < self._stale_at else ()

    def start(self) -> None:
        """Begin to read. Called once."""
        threading.Thread(target=self._run, name="gpu-watch", daemon=True).start()

    def close(self) -> None:
        """Stop reading after the call of NVML that is under way. Idempotent, and does not wait."""
        self._closed.set()

    def _run(self) -> None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            log.warning("nothing is known of this worker's GPUs: install nvidia-ml-py, or Tandem with its extra nvml")
            return
        reader = NvmlReader(nvml, self._uuids)
        while not self._closed.is_set() and reader.gpus:
            self._latest = reader.read()
            self._stale_at = self._clock() + STALE_S
            self._closed.wait(READ_EVERY_S)
        reader.close()


class NvmlReader:
    """NVML, and the GPUs with these UUIDs that it finds. `nvml` is the module pynvml. Raises nothing of NVML's."""

    def __init__(self, nvml: Any, uuids: Sequence[str]) -> None:
        self._nvml = nvml
        self._begun = False
        self.gpus: list[_Gpu] = []
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            log.warning("nothing is known of this worker's GPUs: NVML does not start: %s", error)
            return
        self._begun = True
        for uuid in uuids:
            try:
                self.gpus.append(_Gpu(nvml, uuid, nvml.nvmlDeviceGetHandleByUUID(uuid)))
            except nvml.NVMLError as error:
                log.warning("nothing is known of %s: NVML does not find it: %s", uuid, error)

    def read(self) -> tuple[GpuReport, ...]:
        """Ask every GPU for all that it tells. Takes milliseconds, or as long as the driver hangs."""
        return tuple(gpu.read() for gpu in self.gpus)

    def close(self) -> None:
        """Shut NVML down. Idempotent."""
        if not self._begun:
            return
        self._begun = False
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError as error:
            log.info("NVML does not end: %s", error)


class _Gpu:
    """One GPU with its handle of NVML's. From now on, its XID errors are kept for the readings."""

    def __init__(self, nvml: Any, uuid: str, handle: Any) -> None:
        self._nvml = nvml
        self._uuid = uuid
        self._handle = handle
        self._told: set[tuple[str, str]] = set()
        """The failures that the log has: what was asked for, and the error."""
        self._events: Any = self._registered_events()
        self._latest_xid = 0

    def _registered_events(self) -> Any:
        """A set of events that gets the GPU's XID errors, or None where NVML does not tell them."""
        nvml = self._nvml
        events = self._ask("XID errors", nvml.nvmlEventSetCreate)
        if events is None:
            return None
        try:
            nvml.nvmlDeviceRegisterEvents(self._handle, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError as error:
            self._note("XID errors", error)
            return None
        return events

    def read(self) -> GpuReport:
        """Ask for every figure by itself, since each of them may be missing."""
        nvml, handle = self._nvml, self._handle
        rates = self._ask("utilization", nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask("memory", nvml.nvmlDeviceGetMemoryInfo, handle)
        milliwatts = self._ask("power", nvml.nvmlDeviceGetPowerUsage, handle)
        uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return GpuReport(
            uuid=self._uuid,
            utilization=None if rates is None else rates.gpu / 100,
            memory_used_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
            temperature_c=self._ask("temperature", nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            power_w=None if milliwatts is None else milliwatts / 1000,
            ecc_uncorrected=self._ask("memory errors", nvml.nvmlDeviceGetTotalEccErrors, handle, *uncorrected),
            latest_xid=self._read_xid(),
        )

    def _read_xid(self) -> int | None:
        """The latest XID error since the watch began, 0 if there was none, or None where NVML does not tell."""
        if self._events is None:
            return None
        nvml = self._nvml
        try:
            for _ in range(_MOST_EVENTS):
                self._latest_xid = nvml.nvmlEventSetWait_v2(self._events, _EVENT_WAIT_MS).eventData
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_TIMEOUT:
                self._note("XID errors", error)
        return self._latest_xid

    def _ask(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """What NVML answers, or None, noted once, where it fails."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError as error:
            self._note(what, error)
            return None

    def _note(self, what: str, error: Exception) -> None:
        failure = what, str(error)
        if failure not in self._told:
            self._told.add(failure)
            log.warning("NVML does not tell the %s of %s: %s", what, self._uuid, error)
