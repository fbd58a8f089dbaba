"""Nodes that will go, as their machines, their pods or an operator have said, and how workers leave them in time."""
