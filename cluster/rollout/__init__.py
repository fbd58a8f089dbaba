"""A new configuration for the workers of a running cluster: tried on a share of the requests, judged, taken or rolled back."""
