"""Two Ray nodes on this machine, until stdin closes; run by test_two_nodes.py.

Writes one line of JSON: how to join, and the id of the node with each role's resource. On the line "replace" the decode node is
killed, and another one starts. Answers each line on stdin with the nodes of Tandem's placement groups, by name.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from pathlib import Path

from cluster.ray.session import lean_node, local_environment


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # Ray says there what becomes of its nodes
    with tempfile.TemporaryDirectory(prefix="tandem-", dir="/tmp") as scratch:
        environment = local_environment(Path(scratch)) | {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0"}
        os.environ.update(environment)
        import ray
        from ray.cluster_utils import Cluster

        with lean_node():
            cluster = Cluster(
                initialize_head=True,
                head_node_args={"num_cpus": 2, "resources": {"tandem_prefill": 1}, "include_dashboard": False},
            )
        try:
            decode_node = cluster.add_node(num_cpus=2, resources={"tandem_decode": 1})
            ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
            homes = {name: node["NodeID"] for node in ray.nodes() for name in node["Resources"]}
            first = {
                "address": cluster.address,
                "environment": environment,
                "prefill_node": homes["tandem_prefill"],
                "decode_node": homes["tandem_decode"],
            }
            print(json.dumps(first), file=answers, flush=True)
            for line in sys.stdin:
                if line.strip() == "replace":
                    cluster.remove_node(decode_node, allow_graceful=False)
                    decode_node = cluster.add_node(num_cpus=2, resources={"tandem_decode": 1})
                groups = ray.util.placement_group_table().values()
                alive = {group["name"]: group["bundles_to_node_id"][0] for group in groups if group["state"] == "CREATED"}
                print(json.dumps(alive), file=answers, flush=True)
            ray.shutdown()
        finally:
            cluster.shutdown()


if __name__ == "__main__":
    main()
