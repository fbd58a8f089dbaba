"""What is left out of a Ray node of our own, by the names that the installed Ray has for it."""

from __future__ import annotations

import inspect
from typing import Any

from ray._private import parameter, services

from cluster.ray.lean_node import LEFT_OUT, lean_node


def test_ray_knows_what_is_left_out() -> None:
    assert LEFT_OUT.keys() <= inspect.signature(parameter.RayParams).parameters.keys()


def test_a_node_has_no_monitors_no_dashboard_and_an_agent_at_any_port() -> None:
    with lean_node():
        made = parameter.RayParams(num_cpus=1, include_dashboard=False)
        made.update_if_absent(include_log_monitor=True, no_monitor=False, dashboard_agent_listen_port=52365)
        dashboard: Any = services.start_api_server
        assert dashboard(False, True, port=8265) == ("", None)
    assert {name: getattr(made, name) for name in LEFT_OUT} == LEFT_OUT


def test_other_nodes_are_as_they_were() -> None:
    whole, dashboard = parameter.RayParams, services.start_api_server
    with lean_node():
        pass
    assert (parameter.RayParams, services.start_api_server) == (whole, dashboard)
