"""The chat page at `/`."""
