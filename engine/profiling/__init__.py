"""Measures what a worker may choose by: libraries of one arithmetic, and how many tokens a step has."""
