"""Blocks of KV cache outside the pools, in files of a folder that all workers of a node share."""
