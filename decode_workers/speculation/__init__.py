"""Speculative decoding: tokens that are guessed, and verified in the step that computes the newest one."""
