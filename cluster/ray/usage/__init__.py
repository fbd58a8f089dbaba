"""The usage log in a cluster: an actor on the head node that owns its files. Imported only where there is a usage log."""
