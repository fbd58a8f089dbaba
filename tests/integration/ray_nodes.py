"""A Ray head node and others that come and go, all on this machine, until stdin closes; run by test_leaving_nodes.py.

The arguments are the resources of each other node, as JSON. Writes one line of JSON: how to join, and the nodes' ids. Each
line on stdin is an order, and gets a line of JSON:

    where       the nodes of Tandem's placement groups, by name
    up          the ids of the nodes that are up
    add JSON    a further node with these resources; its id
    controller  the process id of Tandem's controller
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from cluster.ray.session import lean_node, local_environment


def answer(cluster: Any, order: str) -> Any:
    import ray

    from cluster.controller import find_controller

    name, _, argument = order.strip().partition(" ")
    match name:
        case "where":
            groups = ray.util.placement_group_table().values()
            return {group["name"]: group["bundles_to_node_id"][0] for group in groups if group["state"] == "CREATED"}
        case "up":
            return [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        case "add":
            return cluster.add_node(num_cpus=2, resources=json.loads(argument)).node_id
        case "controller":
            handle: Any = find_controller()
            return ray._private.state.state.actor_table(handle._actor_id.hex())["Pid"]
    raise ValueError(order)


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # Ray says there what becomes of its nodes
    with tempfile.TemporaryDirectory(prefix="tandem-", dir="/tmp") as scratch:
        environment = local_environment(Path(scratch)) | {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0"}
        os.environ.update(environment)
        import ray
        from ray.cluster_utils import Cluster

        with lean_node():
            cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        try:
            others = [cluster.add_node(num_cpus=2, resources=json.loads(each)).node_id for each in sys.argv[1:]]
            ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
            first = {
                "address": cluster.address,
                "environment": environment,
                "head": cluster.head_node.node_id,
                "others": others,
            }
            print(json.dumps(first), file=answers, flush=True)
            for order in sys.stdin:
                print(json.dumps(answer(cluster, order)), file=answers, flush=True)
            ray.shutdown()
        finally:
            cluster.shutdown()


if __name__ == "__main__":
    main()
