"""Metric names, logging and per-request times: what Tandem says about itself."""
