"""The chat page, served at `/`."""
