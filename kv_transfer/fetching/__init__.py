"""Cached blocks that one worker fetches from the pool of another."""
