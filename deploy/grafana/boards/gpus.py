"""The row of workers' GPUs, for clusters that have some."""

from __future__ import annotations

from deploy.grafana.panels import Query, gauge, lines, row

_ABOUT = "Empty without GPUs, and without nvidia-ml-py on the workers' nodes."


def _of_gpus(name: str) -> Query:
    """A figure of each worker's GPU. Workers that share a GPU show the same."""
    return gauge(f"tandem:gpu_{name}", "worker, gpu", how="max").named("{{worker}}")


GPUS = row(
    "GPUs",
    lines("GPU utilization", "percentunit", _of_gpus("utilization"), about=f"Share of time in which a GPU computes. {_ABOUT}"),
    lines("GPU memory", "percentunit", _of_gpus("memory_used_bytes") / _of_gpus("memory_total_bytes"), about=_ABOUT),
    lines("GPU temperature", "celsius", _of_gpus("temperature_celsius"), about=_ABOUT),
    lines("GPU power", "watt", _of_gpus("power_watts"), about=_ABOUT),
    lines(
        "Memory errors of GPUs",
        "short",
        _of_gpus("ecc_uncorrected_errors_total"),
        about=f"Those that ECC could not correct, since the driver was loaded. {_ABOUT}",
    ),
    lines(
        "Latest XID errors of GPUs",
        "short",
        _of_gpus("latest_xid"),
        about=f"Numbers of NVIDIA's list; 0 is none since the worker's start. {_ABOUT}",
    ),
)
