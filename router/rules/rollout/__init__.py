"""Rules for requests while a new configuration is rolled out: whose workers compute them, and how these do."""
