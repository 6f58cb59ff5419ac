"""Which addresses a name may stand for: those of the public network, and none that lead back to us."""

from __future__ import annotations

import ipaddress
import socket

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_UNICAST = ipaddress.ip_network("2000::/3")
_HIDDEN = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.88.99.0/24",  # relays to IPv6
            "168.63.129.16/32",  # a cloud's metadata behind a public address
            "2001::/32",  # Teredo: an IPv4 address inside
            "2002::/16",  # 6to4: an IPv4 address inside
        ),
    )
)


def public(address: Address) -> bool:
    """Whether an address is one of the public network, with no other address inside it.

    Not public are private, shared, loopback, link-local (metadata services among them), multicast, reserved
    and documentation addresses, and IPv6 forms that carry an IPv4 address.
    """
    if isinstance(address, ipaddress.IPv6Address) and address not in _UNICAST:
        return False
    if address.is_multicast or address.is_reserved or not address.is_global:
        return False
    return not any(address.version == net.version and address in net for net in _HIDDEN)


def our_own(address: Address, port: int) -> bool:
    """Whether an address is one of this machine: what is sent there would come back. Sends nothing."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(address), port))
        except OSError:
            return False
        return probe.getsockname()[0] == str(address)
