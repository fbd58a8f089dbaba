"""Tests of `deploy/`: dashboards, rules, and the pages of alerts. They start neither Prometheus nor Grafana."""
