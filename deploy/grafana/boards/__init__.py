"""The six dashboards, each in a file of its own, in the order in which somebody who looks for a cause goes through them."""

from __future__ import annotations

from deploy.grafana.boards.balance import BALANCE
from deploy.grafana.boards.failures import FAILURES
from deploy.grafana.boards.kv_cache import KV_CACHE
from deploy.grafana.boards.latency import LATENCY
from deploy.grafana.boards.overview import OVERVIEW
from deploy.grafana.boards.tenants import TENANTS

BOARDS = (OVERVIEW, LATENCY, BALANCE, KV_CACHE, TENANTS, FAILURES)
