"""What NVML tells of a worker's GPUs is reported; what it does not tell is unknown, and nothing of it disturbs the worker."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.gpu_checks import uuid_of
from protocol.messages.load import GpuReport
from worker import core, gpus
from worker.gpus import STALE_S, GpuWatch, NvmlReader

GPU = "GPU-8a3d0000-0000-0000-0000-000000000001"
OTHER = "GPU-8a3d0000-0000-0000-0000-000000000002"
NOT_SUPPORTED, NOT_FOUND, DRIVER_NOT_LOADED, TIMEOUT, GPU_IS_LOST = 3, 6, 9, 10, 15


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class Nvml:
    """The module pynvml of a node with GPUs. `failing` has the errors of functions that fail."""

    NVMLError = NvmlError
    NVML_ERROR_TIMEOUT = TIMEOUT
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_TEMPERATURE_GPU = 0
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, uuids: tuple[str, ...] = (GPU,)) -> None:
        self.uuids = uuids
        self.failing: dict[str, int] = {}
        self.hanging: threading.Event | None = None
        self.xids: list[int] = []
        self.users = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def function(*arguments: Any) -> Any:
            if self.hanging is not None:
                self.hanging.wait(10)
            if name in self.failing:
                raise NvmlError(self.failing[name])
            return getattr(self, f"_{name}")(*arguments)

        if not name.startswith("nvml"):
            raise AttributeError(name)
        return function

    def _nvmlInit(self) -> None:
        self.users += 1

    def _nvmlShutdown(self) -> None:
        self.users -= 1

    def _nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.uuids:
            raise NvmlError(NOT_FOUND)
        return f"handle of {uuid}"

    def _nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(gpu=75, memory=40)

    def _nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=60 << 30, total=80 << 30, free=20 << 30)

    def _nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 64

    def _nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 412_500

    def _nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:
        assert (kind, counter) == (self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self.NVML_VOLATILE_ECC)
        return 2

    def _nvmlEventSetCreate(self) -> str:
        return "events"

    def _nvmlDeviceRegisterEvents(self, handle: str, types: int, events: str) -> None:
        assert types == self.nvmlEventTypeXidCriticalError

    def _nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> SimpleNamespace:
        if not self.xids:
            raise NvmlError(TIMEOUT)
        return SimpleNamespace(eventData=self.xids.pop(0))


WELL = GpuReport(GPU, 0.75, 60 << 30, 80 << 30, 64, 412.5, 2, 0)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_gpu_tells_all() -> None:
    nvml = Nvml()
    reader = NvmlReader(nvml, [GPU])
    assert reader.read() == (WELL,)
    nvml.xids = [13, 79]
    assert reader.read()[0].latest_xid == 79
    assert reader.read()[0].latest_xid == 79, "the latest one stays until there is another"
    reader.close()
    reader.close()
    assert nvml.users == 0


FIGURES = {
    "nvmlDeviceGetUtilizationRates": ("utilization",),
    "nvmlDeviceGetMemoryInfo": ("memory_used_bytes", "memory_total_bytes"),
    "nvmlDeviceGetTemperature": ("temperature_c",),
    "nvmlDeviceGetPowerUsage": ("power_w",),
    "nvmlDeviceGetTotalEccErrors": ("ecc_uncorrected",),
    "nvmlEventSetCreate": ("latest_xid",),
    "nvmlDeviceRegisterEvents": ("latest_xid",),
}


@pytest.mark.parametrize("function", FIGURES)
def test_what_is_not_told_is_unknown_and_noted_once(function: str, caplog: pytest.LogCaptureFixture) -> None:
    nvml = Nvml()
    nvml.failing[function] = NOT_SUPPORTED
    reader = NvmlReader(nvml, [GPU])
    for _ in range(3):
        (report,) = reader.read()
        assert {name for name in vars(WELL) if getattr(report, name) is None} == set(FIGURES[function])
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert GPU in caplog.text
    assert f"error {NOT_SUPPORTED}" in caplog.text


def test_a_gpu_that_is_lost_is_unknown_and_its_last_error_is_told(caplog: pytest.LogCaptureFixture) -> None:
    nvml = Nvml()
    reader = NvmlReader(nvml, [GPU])
    nvml.xids = [79]
    nvml.failing = dict.fromkeys(FIGURES, GPU_IS_LOST)
    lost = GpuReport(GPU, None, None, None, None, None, None, 79)
    assert [reader.read() for _ in range(3)] == [(lost,)] * 3
    assert len(caplog.records) == 5, "one line for each figure"
    nvml.failing = {"nvmlEventSetWait_v2": GPU_IS_LOST}
    assert reader.read()[0].latest_xid == 79


def test_gpus_that_nvml_does_not_find_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    assert NvmlReader(Nvml((OTHER,)), [GPU, OTHER]).read()[0].uuid == OTHER
    assert f"nothing is known of {GPU}" in caplog.text


def test_without_a_driver_nothing_is_known(caplog: pytest.LogCaptureFixture) -> None:
    nvml = Nvml()
    nvml.failing["nvmlInit"] = DRIVER_NOT_LOADED
    reader = NvmlReader(nvml, [GPU])
    assert reader.read() == ()
    reader.close()
    assert nvml.users == 0
    assert "NVML does not start" in caplog.text


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nvml]:
    """What `import pynvml` gives. Readings follow each other quickly."""
    module: Any = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(gpus, "READ_EVERY_S", 0.005)
    yield module
    until(lambda: not any(thread.name == "gpu-watch" for thread in threading.enumerate()))


def test_a_watch_reads_until_it_is_closed(nvml: Nvml) -> None:
    watch = GpuWatch([GPU])
    assert watch.reports == ()
    watch.start()
    until(lambda: watch.reports == (WELL,))
    nvml.xids = [31]
    until(lambda: watch.reports[0].latest_xid == 31)
    watch.close()
    until(lambda: nvml.users == 0)


def test_a_watch_whose_driver_hangs_knows_nothing_and_keeps_nobody_waiting(nvml: Nvml) -> None:
    now = 0.0
    watch = GpuWatch([GPU], lambda: now)
    watch.start()
    until(lambda: watch.reports == (WELL,))
    nvml.hanging = threading.Event()

    def later() -> bool:
        nonlocal now
        now += STALE_S
        return watch.reports == ()

    until(later)
    watch.close()
    nvml.hanging.set()


def test_a_watch_without_the_library_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    watch = GpuWatch([GPU])
    watch.start()
    until(lambda: "install nvidia-ml-py" in caplog.text)
    assert watch.reports == ()


def test_gpus_are_named_as_nvidia_smi_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(uuid="8a3d0000-0000-0000-0000-000000000001")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert uuid_of(torch.device("cuda", 0)) == GPU


def test_a_worker_on_a_processor_watches_nothing() -> None:
    assert core._watch_of([uuid_of(torch.device("cpu")), ""]) is None


def test_a_worker_watches_the_gpus_of_all_its_ranks_once_each(nvml: Nvml) -> None:
    nvml.uuids = (GPU, OTHER)
    watch = core._watch_of([GPU, OTHER, GPU])
    assert watch is not None
    watch.start()
    until(lambda: [report.uuid for report in watch.reports] == [GPU, OTHER])
    watch.close()
