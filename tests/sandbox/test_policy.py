"""What may be said of a network: rules, phases, the operator's file, and which addresses are public."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sandbox.egress.addresses import our_own, public
from sandbox.egress.ledger import Ledger
from sandbox.egress.operator import FILE, Bounds, Operator
from sandbox.errors import InfrastructureError, PolicyError
from sandbox.policy import REGISTRIES, DenialReason, Network, Rule
from sandbox.session import spec_from
from sandbox.types import SandboxSpec


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "names a host or a registry"),
        ({"host": "files lab"}, "is not the name of a host"),
        ({"host": "-files.lab"}, "is not the name of a host"),
        ({"host": "files..lab"}, "is not the name of a host"),
        ({"host": "files.lab."}, "is not the name of a host"),
        ({"host": "127.1"}, "is not the name of a host"),
        ({"host": "0x7f000001"}, "is not the name of a host"),
        ({"host": "bücher.de"}, "is not the name of a host"),
        ({"host": "*.lab"}, "names one host"),
        ({"host": "files.lab:80"}, "the port has a field of its own"),
        ({"host": "http://files.lab/a"}, "'files.lab' in place of"),
        ({"host": "::ffff:10.0.0.1"}, "an address with another one in it"),
        ({"host": "files.lab", "port": 0}, "from 1 to 65535, not 0"),
        ({"host": "files.lab", "port": 65536}, "from 1 to 65535"),
        ({"host": "files.lab", "port": "80"}, "from 1 to 65535"),
        ({"host": "files.lab", "port": 443}, 'methods=("CONNECT",)'),
        ({"host": "files.lab", "methods": ()}, "methods are a tuple"),
        ({"host": "files.lab", "methods": "GET"}, "methods are a tuple"),
        ({"host": "files.lab", "methods": ("GETT",)}, "did you mean 'GET'"),
        ({"registry": "pipy"}, "did you mean 'pypi'"),
        ({"registry": "maven"}, "there are pypi, npm, go, crates, debian"),
        ({"registry": "pypi", "host": "pypi.org"}, "says nothing else"),
    ],
)
def test_a_rule_that_cannot_be_meant(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(PolicyError) as raised:
        Rule(**arguments)
    assert says in str(raised.value)


def test_a_rule_has_one_way_to_write_its_host() -> None:
    assert Rule("Files.LAB").host == "files.lab"
    assert Rule("[2606:4700::0:1]").host == "2606:4700::1"


@pytest.mark.parametrize(
    ("phases", "phase", "says"),
    [
        ({"setup": ()}, "setpu", "did you mean 'setup'"),
        ({"setup": ()}, "", "there are setup"),
        ({}, "setup", "none to start in"),
        ({"Set up": ()}, "Set up", "called like setup"),
        ({"setup": [Rule("a.lab")]}, "setup", "is a tuple of rules"),
        ({"setup": (("a.lab", 80),)}, "setup", "is a tuple of rules"),
        ({"setup": (Rule("a.lab"),) * 300}, "setup", "300 rules"),
    ],
)
def test_phases_that_cannot_be_meant(phases: dict[str, Any], phase: str, says: str) -> None:
    with pytest.raises(PolicyError) as raised:
        Network(phases, phase)
    assert says in str(raised.value)


def test_a_network_is_the_same_after_a_journey_as_json() -> None:
    network = Network({"setup": (Rule("a.lab", 8080, ("POST",)), Rule(registry="go")), "solve": ()}, "setup")
    spec = SandboxSpec(network=network)
    assert spec_from(json.loads(json.dumps(asdict(spec)))) == spec
    old = {name: value for name, value in asdict(spec).items() if name != "network"}
    assert not spec_from(old).network
    with pytest.raises(PolicyError):
        Network.of(
            {"phases": {"setup": [{"host": "a.lab", "methods": ["GET"], "sudo": True}]}, "phase": "setup"}
        )


def test_registries_are_tunnels_to_hosts_or_plain_reading() -> None:
    network = Network({name: (Rule(registry=name),) for name in REGISTRIES}, "pypi")
    assert network.rules("pypi")[0] == Rule("pypi.org", 443, ("CONNECT",))
    assert network.rules("debian")[0] == Rule("deb.debian.org", 80, ("GET", "HEAD"))


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
        "224.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "192.88.99.1", "168.63.129.16",
        "240.0.0.1",
        "::1", "::", "fe80::1", "fd00:ec2::254", "ff02::1", "::ffff:8.8.8.8", "64:ff9b::808:808",
        "2002:808:808::1", "2001:0:808:808::1", "2001:db8::1", "::8.8.8.8",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(text: str) -> None:
    assert not public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", ["8.8.8.8", "151.101.0.223", "2606:4700::1111", "2a04:4e42::223"])
def test_addresses_that_are(text: str) -> None:
    assert public(ipaddress.ip_address(text))


def test_the_machine_knows_its_own_addresses() -> None:
    assert our_own(ipaddress.ip_address("127.0.0.1"), 80)
    assert not our_own(ipaddress.ip_address("8.8.8.8"), 80)


def test_the_operator_opens_addresses_with_ports(tmp_path: Path) -> None:
    assert Operator.read(tmp_path) == Operator()
    says = {
        "private": ["10.1.0.0/16:443", "[::1]:80"],
        "names": {"A.lab": "10.1.2.3"},
        "bounds": {"idle_s": 5},
    }
    (tmp_path / FILE).write_text(json.dumps(says))
    operator = Operator.read(tmp_path)
    assert operator.opens(ipaddress.ip_address("10.1.2.3"), 443)
    assert operator.opens(ipaddress.ip_address("::1"), 80)
    assert not operator.opens(ipaddress.ip_address("10.1.2.3"), 80)
    assert not operator.opens(ipaddress.ip_address("10.2.2.3"), 443)
    assert operator.names == {"a.lab": ipaddress.ip_address("10.1.2.3")}
    assert operator.bounds == Bounds(idle_s=5)


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", '{"privat": []}', '{"private": ["10.0.0.1"]}', '{"private": ["10.0.0.1:0"]}',
        '{"private": ["10.0.0.1/8:80"]}', '{"private": [1]}', '{"names": {"a.lab": "b.lab"}}',
        '{"bounds": {"idle": 5}}', '{"bounds": {"idle_s": -5}}', '{"bounds": {"idle_s": "5"}}',
        '{"bounds": {"connections": 1000}}', '{"bounds": {"connections": 1.5}}', "[" * 100_000,
    ],
)  # fmt: skip
def test_an_operators_file_that_is_wrong(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(InfrastructureError, match=FILE):
        Operator.read(tmp_path)


def test_a_million_denials_fill_nothing(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger("box")
    for number in range(5_000):
        ledger.add("solve", DenialReason.HOST, "GET", f"{number}.tunnel\n\x1b[0m.lab" + "x" * 1000, 80)
    denials = ledger.denials()
    assert ledger.reasons == {DenialReason.HOST: 5_000} == {DenialReason.HOST: sum(d.count for d in denials)}
    assert len(denials) < 600 and max(len(denial.host) for denial in denials) < 300
    assert all(denial.host.isprintable() for denial in denials)
    assert len(caplog.records) < 200
