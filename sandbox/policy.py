"""What a sandbox may reach: nothing, or in each phase of its life the few places that the phase names.

A specification without a `Network` has no network at all. With one, all traffic goes through a proxy that is
told by nobody but the node where it may connect (`sandbox/egress`), and `Sandbox.phase` moves on from, say,
a setup that may fetch packages to a solve that may not.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

from sandbox.errors import PolicyError

TLS = "CONNECT"
"""The method of a tunnel: what is said in it is between the sandbox and the host, whose name is checked."""

OWNER_HOST = "sandbox-owner.internal"
"""No name of a network: what the sandbox's owner serves for it, on port 80 (`RemoteBox.hear`)."""

METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", TLS)
REGISTRIES: Mapping[str, tuple[tuple[str, int], ...]] = {
    "pypi": (("pypi.org", 443), ("files.pythonhosted.org", 443)),
    "npm": (("registry.npmjs.org", 443),),
    "go": (("proxy.golang.org", 443), ("sum.golang.org", 443)),
    "crates": (("index.crates.io", 443), ("static.crates.io", 443)),
    "debian": (("deb.debian.org", 80), ("security.debian.org", 80)),
}
"""Hosts and ports by registry: port 80 is read in the open (GET, HEAD), port 443 in a tunnel."""

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_PHASE = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_MAX_RULES = 256


class DenialReason(StrEnum):
    """Why something did not pass."""

    HOST = "host"
    """No rule of the phase names the host."""
    PORT = "port"
    """The host is named, with another port."""
    METHOD = "method"
    """Host and port are named, with other methods."""
    ADDRESS = "address"
    """An address in place of a name, and no rule names it."""
    PRIVATE = "private"
    """The name stands for an address that is not public, or is this machine's own."""
    HOST_MISMATCH = "host_mismatch"
    """The header Host is not where the request goes."""
    SNI_MISMATCH = "sni_mismatch"
    """What comes in the tunnel is not TLS to the host that the tunnel is for."""
    MALFORMED = "malformed"
    """Not a request that can be read in one way only."""
    TOO_LARGE = "too_large"
    """A head, a request or a response beyond its limit."""
    TIMEOUT = "timeout"
    """A request that took too long to come, or a connection that lived for too long."""
    CONNECTIONS = "connections"
    """More connections at once than a sandbox may have."""
    PHASE = "phase"
    """A live connection that the phase which has begun does not allow, and that was cut."""
    PROXY = "proxy"
    """The sandbox's proxy spoke out of turn or has ended: nothing passes any more."""


@dataclass(frozen=True, slots=True)
class Denial:
    """Something that did not pass, and how often, with the times of the first and the last (Unix seconds)."""

    phase: str
    reason: DenialReason
    method: str
    host: str
    port: int
    count: int
    first: float
    last: float

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Denial:
        """Returns the denial that came as JSON values."""
        fields: dict[str, Any] = {**data, "reason": DenialReason(data["reason"])}
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Rule:
    """One place that may be reached: `Rule("files.lab", 8080)`, or a registry: `Rule(registry="pypi")`.

    Attributes:
        host: A name, exactly; or an address, which then is reached as such.
        port: Its port.
        methods: What may be asked there; reading only, if nothing is said. `("CONNECT",)` is TLS, in which
            no method can be seen.
        registry: One of `REGISTRIES`, in place of a host.
        private: The host may have an address that is not public. The operator of the node must have opened
            that address too (`network.json` in its state folder).
    """

    host: str = ""
    port: int = 80
    methods: tuple[str, ...] = ("GET", "HEAD")
    registry: str = ""
    private: bool = False

    def __post_init__(self) -> None:
        if self.registry:
            if self.host or self.private or self.port != 80 or tuple(self.methods) != ("GET", "HEAD"):
                raise PolicyError(f"a rule for the registry {self.registry!r} says nothing else")
            _known("registry", self.registry, REGISTRIES)
            return
        object.__setattr__(self, "host", _host(self.host))
        object.__setattr__(self, "methods", _methods(self.methods))
        if type(self.port) is not int or not 0 < self.port < 65536:
            raise PolicyError(f"the port of {self.host} is a number from 1 to 65535, not {self.port!r}")
        if self.host == OWNER_HOST and (self.port != 80 or TLS in self.methods):
            raise PolicyError(f"{OWNER_HOST} is plain HTTP on port 80")
        if self.port == 443 and TLS not in self.methods:
            raise PolicyError(
                f"port 443 of {self.host} is TLS, in which no method can be seen: "
                'say so with methods=("CONNECT",), or give the port of its plain HTTP'
            )

    def places(self) -> tuple[Rule, ...]:
        """Returns the rule itself, or those that a registry stands for."""
        return tuple(
            Rule(host, port, (TLS,) if port == 443 else ("GET", "HEAD"))
            for host, port in REGISTRIES.get(self.registry, ())
        ) or (self,)


@dataclass(frozen=True, slots=True)
class Network:
    """The phases of a sandbox by name, what each may reach, and the one to start in. Without phases: nothing.

    Network({"setup": (Rule(registry="pypi"),), "solve": ()}, phase="setup")
    """

    phases: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict[str, tuple[Rule, ...]])
    phase: str = ""

    def __post_init__(self) -> None:
        for name, rules in self.phases.items():
            if not _PHASE.fullmatch(name):
                raise PolicyError(f"a phase is called like setup or solve-2, not {name!r}")
            _check_rules(name, rules)
        if self.phases:
            self.check(self.phase)
        elif self.phase:
            raise PolicyError(f"there are no phases, so none to start in (asked for {self.phase!r})")

    def __bool__(self) -> bool:
        """Whether there is a network at all."""
        return bool(self.phases)

    def check(self, phase: str) -> None:
        """Passes a phase that there is.

        Raises:
            PolicyError: There is none of that name.
        """
        if not self.phases:
            raise PolicyError("this sandbox has no network: give SandboxSpec(network=Network(...)) phases")
        _known("phase", phase, self.phases)

    def rules(self, phase: str) -> tuple[Rule, ...]:
        """Returns what a phase may reach, registries as their hosts."""
        return tuple(place for rule in self.phases[phase] for place in rule.places())

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Network:
        """Returns the network that came as JSON values.

        Raises:
            PolicyError: It is none.
        """
        try:
            read: dict[str, list[dict[str, Any]]] = data["phases"]
            phases = {name: tuple(map(_rule, rules)) for name, rules in read.items()}
            return cls(phases, data["phase"])
        except (TypeError, KeyError, AttributeError) as error:
            raise PolicyError(f"a network has phases with rules, and one to start in: {error}") from error


def _rule(data: dict[str, Any]) -> Rule:
    fields: dict[str, Any] = {**data, "methods": tuple(data["methods"])}
    return Rule(**fields)


def _check_rules(phase: str, rules: object) -> None:
    found = cast("tuple[object, ...]", rules) if isinstance(rules, tuple) else ()
    if not isinstance(rules, tuple) or not all(isinstance(rule, Rule) for rule in found):
        raise PolicyError(f"phase {phase!r} is a tuple of rules, as in (Rule(...),), not {rules!r}")
    if len(found) > _MAX_RULES:
        raise PolicyError(f"phase {phase!r} has {len(found)} rules, more than {_MAX_RULES}")


def literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Returns the address that a host is written as, if it is one."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def numeric(host: str) -> bool:
    """Whether a host is an address, or what some programs take for one (127.1, 0x7f000001, 2130706433)."""
    return literal(host) is not None or host.rsplit(".", 1)[-1][:1].isdigit()


def _known(what: str, name: str, among: Iterable[str]) -> None:
    names = list(among)
    if name not in names:
        near = difflib.get_close_matches(str(name), names, 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
        raise PolicyError(f"there is no {what} {name!r}; {hint}")


def _host(host: object) -> str:
    if not isinstance(host, str) or not host:
        raise PolicyError('a rule names a host or a registry: Rule("files.lab", 8080), Rule(registry="pypi")')
    if "://" in host or "/" in host:
        name = host.split("://")[-1].split("/")[0]
        raise PolicyError(f"a rule names a host, not an address of a page: {name!r} in place of {host!r}")
    bare = host.strip("[]")
    if (address := literal(bare)) is not None:
        if getattr(address, "scope_id", None) or getattr(address, "ipv4_mapped", None):
            raise PolicyError(f"{host!r} is an address with another one in it: give that one")
        return address.compressed
    name = host.lower()
    if ":" in name:
        raise PolicyError(f"the port has a field of its own: Rule({name.split(':')[0]!r}, port=...)")
    if "*" in name:
        raise PolicyError(f"{host!r}: a rule names one host; name each that is needed")
    if len(name) > 253 or numeric(name) or not all(map(_LABEL.fullmatch, name.split("."))):
        raise PolicyError(f"{host!r} is not the name of a host: letters, digits, '-' and dots")
    return name


def _methods(methods: Iterable[str]) -> tuple[str, ...]:
    if isinstance(methods, str) or not (found := tuple(methods)):
        raise PolicyError(f"methods are a tuple of some of {', '.join(METHODS)}, not {methods!r}")
    for method in found:
        _known("method", method, METHODS)
    return found
