"""Simulated clusters whose sizes change while they serve."""
