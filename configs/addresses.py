"""What an address tells about who can reach it."""

from __future__ import annotations

import ipaddress

WILDCARDS = ("0.0.0.0", "::")
"""Hosts that stand for all addresses of a machine: of IPv4, and of both kinds."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`, an address or `localhost`. False for other names, which are not looked up."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
