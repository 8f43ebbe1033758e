"""
Which addresses the web tools may connect to (reliability 3.10, NW01, NW02, NW18).

The table is our own: the standard library calls several addresses global that lead to this machine, to its network or to
its cloud host. An IPv4 address inside of an IPv6 address is taken out and judged too; tunnels are refused as such.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import TypeAlias

__all__ = ("Network", "blocked_reason", "networks", "numeric_address")

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

# fmt: off
BLOCKED_V4 = tuple((ipaddress.IPv4Network(net), why) for net, why in (
    ("0.0.0.0/8", "this host"), ("10.0.0.0/8", "private"), ("100.64.0.0/10", "shared address space"),
    ("127.0.0.0/8", "loopback"), ("168.63.129.16/32", "a service of the cloud host"), ("169.254.0.0/16", "link-local"),
    ("172.16.0.0/12", "private"), ("192.0.0.0/24", "reserved for protocols"), ("192.0.2.0/24", "documentation"),
    ("192.31.196.0/24", "reserved for protocols"), ("192.52.193.0/24", "reserved for protocols"),
    ("192.88.99.0/24", "a tunnel (6to4)"), ("192.168.0.0/16", "private"), ("192.175.48.0/24", "reserved for protocols"),
    ("198.18.0.0/15", "benchmarking"), ("198.51.100.0/24", "documentation"), ("203.0.113.0/24", "documentation"),
    ("224.0.0.0/4", "multicast"), ("240.0.0.0/4", "reserved or broadcast"),
))
BLOCKED_V6 = tuple((ipaddress.IPv6Network(net), why) for net, why in (
    ("64:ff9b:1::/48", "a translation of a local network"), ("2001::/23", "a tunnel or reserved for protocols"),
    ("2001:db8::/32", "documentation"), ("2002::/16", "a tunnel (6to4)"), ("2620:4f:8000::/48", "reserved for protocols"),
    ("3fff::/20", "documentation"), ("5f00::/16", "segment routing"),
))
# fmt: on
GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
COMPATIBLE = ipaddress.IPv6Network("::/96")


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """
    Return networks from their text, such as ``"10.1.0.0/16"``.

    Raises:
        ValueError: when one is no network.
    """
    return tuple([ipaddress.ip_network(text) for text in texts])


def numeric_address(text: str) -> Address | None:
    """Return the address that *text* is in its one usual form, or ``None``; a scope id makes it none."""
    try:
        return None if "%" in text else ipaddress.ip_address(text)
    except ValueError:
        return None


def blocked_reason(text: str, allowed: Sequence[Network] = ()) -> str:
    """
    Return why no connection is made to an address; empty when it may be used.

    Args:
        text: The address.
        allowed: Networks that may be used whatever the table says.
    """
    address = numeric_address(text)
    if address is None:
        return "no plain IP address"
    if any(address.version == net.version and address in net for net in allowed):
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return next((why for net, why in BLOCKED_V4 if address in net), "")
    if any(address in net for net in (MAPPED, COMPATIBLE, TRANSLATED)):
        inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        why = blocked_reason(str(inner), allowed)
        if why or address not in TRANSLATED:
            return f"IPv4 inside of IPv6, {why or 'which nobody uses on the public internet'}"
        return ""
    return next((why for net, why in BLOCKED_V6 if address in net), "" if address in GLOBAL_V6 else "not public")
