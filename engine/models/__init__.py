"""The dense decoder and its weights."""
