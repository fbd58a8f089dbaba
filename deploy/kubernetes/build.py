"""Write the rules of `deploy/prometheus` as Prometheus' operator takes them: `python -m deploy.kubernetes.build`.

A test makes the file anew and compares, so change the rules in `deploy/prometheus`, never here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
PROMETHEUS = FOLDER.parent / "prometheus"
TARGET = FOLDER / "monitoring" / "prometheus-rule.yaml"
_HEAD = """\
# NOT TRIED with a running operator. Made from deploy/prometheus by `python -m deploy.kubernetes.build`: change the rules there.
# Prometheus itself runs them in a test (tests/integration/test_prometheus.py).
"""


def prometheus_rule() -> dict[str, Any]:
    """The resource, with the groups of both files."""
    files = (yaml.safe_load((PROMETHEUS / name).read_text()) for name in ("recording.yml", "alerts.yml"))
    # What Prometheus selects rules by is an installation's own: often a label `release`.
    labels = {"app.kubernetes.io/part-of": "tandem"}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "tandem", "namespace": "tandem", "labels": labels},
        "spec": {"groups": [group for each in files for group in each["groups"]]},
    }


def text() -> str:
    """The whole file."""
    return _HEAD + yaml.safe_dump(prometheus_rule(), sort_keys=False, width=160)


if __name__ == "__main__":
    TARGET.write_text(text())
