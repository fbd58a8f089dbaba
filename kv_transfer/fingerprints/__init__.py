"""Fingerprints of pushed KV, by which both ends of a transfer know that just this arrived."""
