"""What routers and workers tell each other of prefix caches."""
