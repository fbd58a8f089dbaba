"""The files for Prometheus: rules name series that there are, alerts are complete, and each has a test that makes it fire.

What promtool says of them is in `tests/integration/test_prometheus.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from protocol.errors import TandemError
from tests.unit.deploy.promql import (
    PROMETHEUS,
    ROOT,
    SCRAPE_LABELS,
    Family,
    known_series,
    labels_in,
    names_in,
    problems,
    recorded_names,
)

RULE_FILES = ("recording.yml", "alerts.yml")


def read(name: str) -> Any:
    return yaml.safe_load((PROMETHEUS / name).read_text())


def rules(name: str) -> list[dict[str, Any]]:
    return [rule for group in read(name)["groups"] for rule in group["rules"]]


ALERTS = rules("alerts.yml")


@pytest.fixture
def known(tmp_path: Path) -> dict[str, Family]:
    return known_series(tmp_path)


def codes() -> dict[str, int]:
    """The HTTP status of every error of the protocol: those that a request can end in. HTTP has a few more, before."""
    found: dict[str, int] = {}
    classes = [TandemError]
    for cls in classes:
        found[cls.code] = cls.http_status
        classes += [below for below in cls.__subclasses__() if below.__module__ == TandemError.__module__]
    return found


@pytest.mark.parametrize("name", RULE_FILES)
def test_files_are_groups_of_rules(name: str) -> None:
    groups = read(name)["groups"]
    assert len({group["name"] for group in groups}) == len(groups)
    for group in groups:
        assert group.keys() <= {"name", "interval", "rules"}
        for rule in group["rules"]:
            assert rule.keys() <= {"record", "alert", "expr", "for", "labels", "annotations"}
            assert ("record" in rule) != ("alert" in rule), rule


@pytest.mark.parametrize("name", RULE_FILES)
def test_rules_name_series_and_labels_that_there_are(name: str, known: dict[str, Family]) -> None:
    recorded = recorded_names()
    wrong = [
        f"{rule.get('alert') or rule['record']}: {problem}"
        for rule in rules(name)
        for problem in problems(rule["expr"], known, recorded)
    ]
    assert not wrong, "\n".join(wrong)


def test_a_time_limit_is_a_bound_of_its_buckets(known: dict[str, Family]) -> None:
    """And written as /metrics writes it; otherwise nothing would be good, or nothing bad."""
    limits = []
    for rule in rules("recording.yml"):
        for name, limit in re.findall(r'([\w:]+_bucket)\{le="([^"]*)"\}', rule["expr"]):
            assert float(limit) in known[name].buckets, (name, limit)
            assert limit == str(float(limit)), (name, limit)
            limits.append(name)
    assert limits == ["tandem:time_to_first_token_seconds_bucket", "tandem:inter_token_latency_seconds_bucket"]


def test_errors_that_are_the_clients_own_are_no_faults_of_the_cluster() -> None:
    (pattern,) = {found for rule in rules("recording.yml") for found in re.findall(r'code!~"([^"]*)"', rule["expr"])}
    assert set(pattern.split("|")) == {"cancelled"} | {code for code, status in codes().items() if status < 500}


def test_codes_that_alerts_name_exist() -> None:
    for rule in ALERTS:
        for pattern in re.findall(r'code=~"([^"]*)"', rule["expr"]):
            assert set(pattern.split("|")) <= codes().keys()


def test_windows_are_those_of_the_names() -> None:
    for rule in rules("recording.yml"):
        if window := re.fullmatch(r"tandem_slo:(?:burn_rate|bad)(\d+[mhd])", rule["record"]):
            assert set(re.findall(r"\[(\w+)\]", rule["expr"])) == {window[1]}, rule["record"]


def test_what_is_recorded_is_read_somewhere() -> None:
    texts = [rule["expr"] for name in RULE_FILES for rule in rules(name)]
    read_somewhere = set().union(*map(names_in, texts))
    assert recorded_names() <= read_somewhere


@pytest.mark.parametrize("rule", ALERTS, ids=[f"{rule['alert']} {rule['labels']['severity']}" for rule in ALERTS])
def test_an_alert_is_complete(rule: dict[str, Any]) -> None:
    assert re.fullmatch(r"Tandem[A-Z]\w+", rule["alert"])
    assert rule["labels"].keys() == {"severity"}
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/alerts/{rule['alert']}.md"
    assert (ROOT / rule["annotations"]["runbook_url"]).is_file()


def test_a_name_and_a_severity_are_one_rule() -> None:
    pairs = [(rule["alert"], rule["labels"]["severity"]) for rule in ALERTS]
    assert len(set(pairs)) == len(pairs)


def test_promtool_sees_every_alert_fire() -> None:
    """In `tests.yml`, which also has a cluster where none does."""
    tests = read("tests.yml")
    assert tests["rule_files"] == list(RULE_FILES)
    samples = [s["labels"] for test in tests["tests"] for check in test["promql_expr_test"] for s in check["exp_samples"]]
    fired = {tuple(re.findall(r'(?:alertname|severity)="([^"]*)"', labels)) for labels in samples}
    assert fired - {()} == {(rule["alert"], rule["labels"]["severity"]) for rule in ALERTS}


def test_promtools_series_are_those_of_metrics(known: dict[str, Family]) -> None:
    for test in read("tests.yml")["tests"]:
        for series in test["input_series"]:
            text = series["series"]
            assert problems(text, known, set()) == [], text
            for name, labels in labels_in(text).items():
                wanted = set() if name == "up" else known[name].labels
                assert labels - SCRAPE_LABELS == wanted, f"{text} should have the labels {', '.join(sorted(wanted))}"


def test_the_example_finds_its_files_and_is_the_job_that_an_alert_asks_for() -> None:
    config = read("prometheus.yml")
    assert config["rule_files"] == list(RULE_FILES)
    (job,) = config["scrape_configs"]
    (down,) = (rule for rule in ALERTS if rule["alert"] == "TandemDown")
    assert set(re.findall(r"\bup\b({[^}]*})?", down["expr"])) == {f'{{job="{job["job_name"]}"}}'}
    assert config["global"]["scrape_interval"] == config["global"]["evaluation_interval"]
