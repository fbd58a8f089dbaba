"""Dashboards: `boards/` describes them, `build.py` writes them as the JSON files that Grafana imports."""
