"""The supervisor of a cluster's workers: it obeys their pools, runs every life of a worker, and records what it knows."""
