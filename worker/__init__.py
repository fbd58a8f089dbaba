"""What a worker of either role is built around."""
