"""How decode workers guess tokens, as far as it is configured."""
