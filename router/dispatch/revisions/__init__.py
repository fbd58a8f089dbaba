"""Workers by the revision of their configuration, and how those of two revisions do beside each other."""
