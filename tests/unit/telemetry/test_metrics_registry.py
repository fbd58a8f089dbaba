"""Metrics: names in vLLM's manner, workers read when asked."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from protocol.cluster_view import AutoscalerState, SizeChanges, WorkerState
from protocol.messages.load import Brought, DecodeLoad, GpuReport, LoadReport, TierReport
from protocol.messages.workers import Duty, Role
from telemetry.cluster_metrics import ClusterSample, WorkerSample
from telemetry.metrics import MOST_TENANTS, OTHERS, Metrics
from tests.unit.load_reports import load_report

REPORT = LoadReport(
    worker_id="d0",
    epoch=1,
    running=3,
    waiting=4,
    queued_tokens=50,
    free_blocks=25,
    total_blocks=100,
    tickets=2,
    transfers=1,
    steps=9,
    busy_s=1.5,
    step_age_s=0.1,
    lent_bytes=3000,
    sent_bytes=9000,
    cached_blocks=7,
    prefix_cache_queries=640,
    prefix_cache_hits=480,
    decode=DecodeLoad(
        reservable_blocks=20,
        generated_tokens=77,
        prefilled_tokens=3,
        num_preemptions=5,
        recomputed_tokens=900,
        step_s=0.02,
        draft_tokens=40,
        accepted_tokens=30,
    ),
)


def read(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (sample.name, tuple(value for key, value in sorted(sample.labels.items()) if key != "model_name")): sample.value
        for family in text_string_to_metric_families(metrics.render(metrics.sample()).decode())
        for sample in family.samples
    }


def test_workers_are_read_at_scrape_time() -> None:
    samples = [WorkerSample("d0", Duty.DECODE, WorkerState.READY, 2, 1, None)]
    metrics = Metrics("m", lambda: ClusterSample(samples, {Role.DECODE: 2}))
    before = read(metrics)
    assert before["tandem:workers_wanted", ("decode",)] == 2
    assert before["tandem:workers", ("decode", "ready")] == 1
    assert before["tandem:workers", ("decode", "starting")] == 0
    assert before["tandem:workers_leaving", ("decode",)] == 0
    assert before["tandem:worker_restarts_total", ("decode", "d0")] == 2
    assert ("tandem:num_requests_running", ("decode", "d0")) not in before, "unknown is not zero"
    samples[:] = [WorkerSample("d0", Duty.DECODE, WorkerState.READY, 2, 1, REPORT, leaves=True)]
    after = read(metrics)
    assert after["tandem:workers_leaving", ("decode",)] == 1
    assert after["tandem:num_requests_running", ("decode", "d0")] == 3
    assert after["tandem:num_requests_waiting", ("decode", "d0")] == 4
    assert after["tandem:kv_cache_usage_perc", ("decode", "d0")] == 0.75
    assert after["tandem:engine_busy_seconds_total", ("decode", "d0")] == 1.5
    assert after["tandem:engine_tokens_total", ("decode", "d0")] == 77
    assert after["tandem:prefix_cache_queries_total", ("decode", "d0")] == 640
    assert after["tandem:prefix_cache_hits_total", ("decode", "pool", "d0")] == 480
    assert after["tandem:prefix_cache_hits_total", ("decode", "peer", "d0")] == 0
    assert after["tandem:lent_bytes_total", ("decode", "d0")] == 3000
    assert after["tandem:kv_transfer_sent_bytes_total", ("decode", "d0")] == 9000
    assert after["tandem:num_preemptions_total", ("decode", "d0")] == 5
    assert after["tandem:spec_decode_num_draft_tokens_total", ("decode", "d0")] == 40
    assert after["tandem:spec_decode_num_accepted_tokens_total", ("decode", "d0")] == 30
    assert after["tandem:recomputed_tokens_total", ("decode", "d0")] == 900
    tier = TierReport("memory", 7, 7000, 5, 1, 2, 3, 4, 5000, 600)
    samples[:] = [
        WorkerSample(
            "d0", Duty.DECODE, WorkerState.READY, 2, 1, replace(REPORT, tiers=(tier,), brought=Brought.of("disk", 80, 0.1))
        )
    ]
    tiered = read(metrics)
    assert tiered["tandem:kv_tier_bytes", ("decode", "memory", "d0")] == 7000
    assert tiered["tandem:kv_tier_damaged_blocks_total", ("decode", "memory", "d0")] == 2
    assert tiered["tandem:kv_tier_read_bytes_total", ("decode", "memory", "d0")] == 600
    assert tiered["tandem:prefix_cache_hits_total", ("decode", "pool", "d0")] == 400
    assert tiered["tandem:prefix_cache_hits_total", ("decode", "disk", "d0")] == 80
    samples.clear()
    assert ("tandem:num_requests_running", ("decode", "d0")) not in read(metrics), "a gone worker leaves no gauge behind"


def test_the_autoscalers_decisions_are_told_by_role_and_direction() -> None:
    state = AutoscalerState("by hand", (), (SizeChanges(Role.PREFILL, up=3, down=1), SizeChanges(Role.DECODE)))
    told = read(Metrics("m", lambda: ClusterSample(autoscaler=state)))
    assert {key: value for key, value in told.items() if key[0].startswith("tandem:autoscaler_")} == {
        ("tandem:autoscaler_decisions_total", ("up", "prefill")): 3,
        ("tandem:autoscaler_decisions_total", ("down", "prefill")): 1,
        ("tandem:autoscaler_decisions_total", ("up", "decode")): 0,
        ("tandem:autoscaler_decisions_total", ("down", "decode")): 0,
        ("tandem:autoscaler_paused", ()): 1,
    }


def test_gpus_tell_what_is_known_of_them() -> None:
    gpu = GpuReport("GPU-1", 0.5, 7000, 8000, 60, 250.5, 2, None)
    blind = GpuReport("GPU-2", None, None, None, None, None, None, 79)
    report = replace(REPORT, gpus=(gpu, blind))
    told = read(Metrics("m", lambda: ClusterSample([WorkerSample("d0", Duty.DECODE, WorkerState.READY, 0, 0, report)])))
    of_gpus = {key: value for key, value in told.items() if key[0].startswith("tandem:gpu_")}
    assert of_gpus == {
        ("tandem:gpu_utilization", ("GPU-1", "decode", "d0")): 0.5,
        ("tandem:gpu_memory_used_bytes", ("GPU-1", "decode", "d0")): 7000,
        ("tandem:gpu_memory_total_bytes", ("GPU-1", "decode", "d0")): 8000,
        ("tandem:gpu_temperature_celsius", ("GPU-1", "decode", "d0")): 60,
        ("tandem:gpu_power_watts", ("GPU-1", "decode", "d0")): 250.5,
        ("tandem:gpu_ecc_uncorrected_errors_total", ("GPU-1", "decode", "d0")): 2,
        ("tandem:gpu_latest_xid", ("GPU-2", "decode", "d0")): 79,
    }


def test_counters_are_per_registry() -> None:
    one, two = Metrics("m", ClusterSample), Metrics("m", ClusterSample)
    one.generation_tokens.inc(5)
    one.succeeded("stop")
    one.failed("overloaded")
    assert read(one)["tandem:generation_tokens_total", ("router-0",)] == 5
    assert read(one)["tandem:request_success_total", ("stop", "router-0")] == 1
    assert read(one)["tandem:request_errors_total", ("overloaded", "router-0")] == 1
    assert read(two)["tandem:generation_tokens_total", ("router-0",)] == 0


def test_tenants_beyond_a_number_count_as_one() -> None:
    metrics = Metrics("m", ClusterSample)
    names = [f"t{number}" for number in range(MOST_TENANTS + 5)]
    for name in [*names, *names]:
        metrics.tenant(name).generation_tokens.inc(3)
        metrics.tenant(name).prompt_tokens.inc(2)
    found = {key: value for key, value in read(metrics).items() if key[0] == "tandem:tenant_generation_tokens_total"}
    assert len(found) == MOST_TENANTS + 1
    assert found["tandem:tenant_generation_tokens_total", ("router-0", "t0")] == 6
    assert found["tandem:tenant_generation_tokens_total", ("router-0", OTHERS)] == 30
    assert sum(found.values()) == 6 * len(names)


def test_kv_usage_of_an_empty_pool() -> None:
    assert load_report("d0", total_blocks=0).kv_usage == 0.0


def test_a_worker_on_standby_is_not_among_those_of_a_role() -> None:
    ready = WorkerSample("d0", Duty.DECODE, WorkerState.READY, 0, 0, REPORT)
    told = read(Metrics("m", lambda: ClusterSample([ready, replace(ready, worker_id="d1", state=WorkerState.STANDBY)])))
    pools = {key for key in told if key[0] == "tandem:kv_cache_usage_perc"}
    assert pools == {("tandem:kv_cache_usage_perc", ("decode", "d0")), ("tandem:kv_cache_usage_perc", ("standby", "d1"))}
