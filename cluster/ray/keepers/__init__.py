"""Actors of the cluster on the head node, each with something that outlives the routers."""
