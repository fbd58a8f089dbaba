"""The HTTP endpoints, above the router that does their work and the rooms that check, write and record."""
