"""Prompts whose answers repeat much of them: quotes, edited code, answers out of given passages."""
