"""A cluster in virtual time: the real routing and scheduling code, and step times from a measured profile."""
