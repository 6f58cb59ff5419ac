"""What the operator of a node lets networks do: `network.json` in the node's state folder; all optional.

    {"private": ["10.0.0.5:8080", "10.1.0.0/16:443"], "names": {"mirror.lab": "10.0.0.5"},
     "bounds": {"connections": 32, "response_bytes": 1073741824}}

A specification alone opens no address that is not public: a rule must say `private`, and the operator must
have opened that address and port here. Names given here are not looked up elsewhere.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from sandbox.egress.addresses import Address
from sandbox.errors import InfrastructureError

FILE = "network.json"
_MOST_CONNECTIONS = 256
_Net = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one sandbox's traffic: connections at once, bytes of a body each way, seconds.

    Seconds: until a request (or the greeting in a tunnel) has come whole, without a byte, and in all.
    """

    connections: float = 32
    request_bytes: float = 1 << 20
    response_bytes: float = 1 << 30
    head_s: float = 10.0
    idle_s: float = 60.0
    total_s: float = 1800.0


@dataclass(frozen=True, slots=True)
class Operator:
    """What `network.json` says."""

    private: tuple[tuple[_Net, int], ...] = ()
    names: Mapping[str, Address] = field(default_factory=dict[str, Address])
    bounds: Bounds = field(default_factory=Bounds)

    def opens(self, address: Address, port: int) -> bool:
        """Whether rules may reach an address that is not public."""
        return any(
            port == opened and address.version == net.version and address in net
            for net, opened in self.private
        )

    @classmethod
    def read(cls, state_dir: Path) -> Operator:
        """Returns what the operator of a state folder has said.

        Raises:
            InfrastructureError: The file cannot be understood.
        """
        path = state_dir / FILE
        try:
            text = path.read_text()
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError) as error:
            raise InfrastructureError(f"{path} cannot be read: {error}") from error
        try:
            data: object = json.loads(text)
            if not isinstance(data, dict):
                raise ValueError("it is not a JSON object")
            return cls._of(cast("dict[str, Any]", data))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise InfrastructureError(f"{path} is not what it is to be: {error}") from error

    @classmethod
    def _of(cls, data: dict[str, Any]) -> Operator:
        if unknown := set(data) - {"private", "names", "bounds"}:
            raise ValueError(f"it has {sorted(unknown)}; there are private, names and bounds")
        names = {str(name).lower(): ipaddress.ip_address(at) for name, at in data.get("names", {}).items()}
        return cls(tuple(map(_opened, data.get("private", []))), names, _bounds(data.get("bounds", {})))


def _opened(text: str) -> tuple[_Net, int]:
    net, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not an address or network with a port, as in 10.1.0.0/16:443")
    return ipaddress.ip_network(net.strip("[]")), int(port)


def _bounds(data: dict[str, Any]) -> Bounds:
    if unknown := set(data) - {known.name for known in fields(Bounds)}:
        raise ValueError(f"there are no bounds {sorted(unknown)}; there are {', '.join(asdict(Bounds()))}")
    bounds = Bounds(**data)
    for name, value in asdict(bounds).items():
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise ValueError(f"the bound {name} is a number above 0, not {value!r}")
    if bounds.connections > _MOST_CONNECTIONS or bounds.connections != int(bounds.connections):
        raise ValueError(f"connections are a whole number up to {_MOST_CONNECTIONS}")
    return bounds
