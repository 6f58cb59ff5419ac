"""Tokens, quotas, start rates, metrics and the audit log, without a server."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox import tokens
from sandbox.audit import Audit, asked
from sandbox.errors import PolicyError, RefusedError
from sandbox.journal import digest
from sandbox.limiter import StartRate
from sandbox.metrics import Metrics
from sandbox.placement import Room
from sandbox.quotas import Ledger
from sandbox.serving import Bind
from sandbox.tokens import TOKEN, TOKEN_FILE, Quota, fresh_token, own_token, read_access, read_token


def access_file(path: Path, **changes: object) -> tuple[Path, str]:
    token, sha256 = fresh_token()
    entry = {"name": "alice", "sha256": sha256, "project": "lab/agents"}
    path.write_text(json.dumps({"version": 1, "projects": {"lab": {}}, "tokens": [entry], **changes}))
    path.chmod(0o600)
    return path, token


def test_a_token_stands_for_its_principal_and_another_for_nobody(tmp_path: Path) -> None:
    path, token = access_file(tmp_path / "access")
    access = read_access(path, {})
    alice = access.principal(f"Bearer {token}")
    assert alice is not None
    assert (alice.name, alice.project, alice.operator) == ("alice", "lab/agents", False)
    assert alice.oversees("lab/agents/x") and not alice.oversees("lab") and not alice.oversees("lab/agents2")
    for wrong in ("", token, f"Bearer {token[:-1]}", f"Basic {token}", "Bearer", "Bearer \udcff"):
        assert access.principal(wrong) is None


def test_secrets_that_others_can_read_or_guess_are_refused(tmp_path: Path) -> None:
    path, token = access_file(tmp_path / "access")
    path.chmod(0o640)
    with pytest.raises(PolicyError, match="chmod 600"):
        read_access(path, {})
    with pytest.raises(PolicyError, match="there is no token"):
        read_access(None, {})
    with pytest.raises(PolicyError, match="can be guessed"):
        read_token({TOKEN: "secret"}, TOKEN, TOKEN_FILE)
    (tmp_path / "token").write_text(token + "\n")
    with pytest.raises(PolicyError, match="chmod 600"):
        read_token({TOKEN_FILE: str(tmp_path / "token")}, TOKEN, TOKEN_FILE)
    (tmp_path / "token").chmod(0o600)
    assert read_token({TOKEN_FILE: str(tmp_path / "token")}, TOKEN, TOKEN_FILE) == token


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"tokens": []},
        {"tokens": [{"name": "a", "token": "in the clear", "project": "lab"}]},
        {"tokens": [{"name": "a", "sha256": "0" * 64, "project": "lab:x"}]},
        {"projects": {"lab//x": {}}},
        {"projects": {"lab": {"sandboxes": -1}}},
        {"more": 1},
    ],
)
def test_a_wrong_access_file_is_an_error(tmp_path: Path, changes: dict[str, object]) -> None:
    path, _ = access_file(tmp_path / "access", **changes)
    with pytest.raises(PolicyError, match="access"):
        read_access(path, {})


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "fleet.example"])
def test_beyond_loopback_needs_a_word(host: str) -> None:
    with pytest.raises(PolicyError, match="--public"):
        Bind(host).check()
    Bind(host, public=True).check()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_loopback_does_not(host: str) -> None:
    Bind(host).check()


PROJECTS = ("lab", "lab/a", "lab/a/x", "lab/b", "labs")


@settings(max_examples=30, deadline=None)
@given(
    reports=st.lists(
        st.tuples(st.sampled_from("mn"), st.dictionaries(st.sampled_from(PROJECTS), st.integers(0, 5))),
        max_size=8,
    ),
    ahead=st.dictionaries(st.sampled_from(PROJECTS), st.integers(1, 5)),
    quotas=st.dictionaries(st.sampled_from(PROJECTS), st.integers(0, 12)),
    project=st.sampled_from(PROJECTS),
)
def test_a_project_is_charged_along_its_ancestors(
    reports: list[tuple[str, dict[str, int]]],
    ahead: dict[str, int],
    quotas: dict[str, int],
    project: str,
) -> None:
    ledger = Ledger({name: Quota(sandboxes=most) for name, most in quotas.items()})
    last: dict[str, dict[str, int]] = {}
    for node, held in reports:
        ledger.report(node, {name: Room(count) for name, count in held.items()})
        last[node] = held

    def held_below(top: str) -> int:
        counts = [*ahead.items(), *(item for report in last.values() for item in report.items())]
        return sum(count for name, count in counts if (name + "/").startswith(top + "/"))

    above = [name for name in PROJECTS if (project + "/").startswith(name + "/")]
    fits = all(held_below(name) + 1 <= quotas.get(name, 99) for name in above)
    try:
        ledger.check(project, Room(1), lambda name: Room(ahead.get(name, 0)), set(ahead))
        admitted = True
    except RefusedError as error:
        admitted = False
        assert error.reason == "quota"
    assert admitted == fits


def test_other_quotas_count_too() -> None:
    ledger = Ledger({"lab": Quota(memory_bytes=100, cpus=2)})
    ledger.report("n", {"lab": Room(1, 60, 1.0)})
    ledger.check("lab", Room(1, 40, 1.0), lambda _: Room(), set())
    for room in (Room(1, 41, 0.5), Room(1, 1, 1.5)):
        with pytest.raises(RefusedError, match="lab would be passed"):
            ledger.check("lab", room, lambda _: Room(), set())


@settings(max_examples=30, deadline=None)
@given(
    per_s=st.floats(0.5, 50),
    steps=st.lists(st.tuples(st.floats(0, 3), st.integers(1, 20)), max_size=60),
)
def test_no_more_starts_than_the_rate_and_its_burst(per_s: float, steps: list[tuple[float, int]]) -> None:
    rate, now, taken, largest = StartRate(per_s), 100.0, 0, 0
    for wait, starts in steps:
        now += wait
        try:
            rate.take(now, starts)
        except RefusedError as error:
            assert error.reason == "start_rate"
            assert "can be in" in str(error)
            continue
        taken, largest = taken + starts, max(largest, starts)
    assert taken <= per_s * (now - 100.0) + rate.burst + largest


def test_a_refused_start_costs_nothing() -> None:
    rate = StartRate(per_s=1, burst=2)
    rate.take(10.0, 2)
    for _ in range(5):
        with pytest.raises(RefusedError, match=r"in 0\.5 s"):
            rate.take(10.5)
    rate.take(11.0)


def test_metrics_in_the_format_of_prometheus() -> None:
    metrics = Metrics()
    calls = metrics.counter("calls_total", "Calls.", "op", "outcome")
    times = metrics.histogram("call_seconds", "Times.", "op")
    metrics.gauge("nodes", "Nodes.", lambda: [(('a"\\\n',), 2.5)], "node")
    calls.add("run", "ok")
    calls.add("run", "ok", by=2)
    for seconds in (0.002, 0.3, 1e6):
        times.observe(seconds, "run")
    lines = metrics.text().splitlines()
    assert lines[:2] == ["# HELP calls_total Calls.", "# TYPE calls_total counter"]
    assert lines[2] == 'calls_total{op="run",outcome="ok"} 3'
    assert 'call_seconds_bucket{op="run",le="0.001"} 0' in lines
    assert 'call_seconds_bucket{op="run",le="0.002"} 1' in lines
    assert 'call_seconds_bucket{op="run",le="0.5"} 2' in lines
    assert 'call_seconds_bucket{op="run",le="+Inf"} 3' in lines
    assert 'call_seconds_count{op="run"} 3' in lines
    assert r'nodes{node="a\"\\\n"} 2.5' in lines


def test_the_audit_log_goes_on_in_a_new_file_when_rotated(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    audit = Audit(path)
    audit.write(event="one")
    path.rename(tmp_path / "audit.1")
    audit.write(event="two\nlines")
    audit.close()
    assert path.stat().st_mode & 0o777 == 0o600
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["two\nlines"]
    assert json.loads((tmp_path / "audit.1").read_text())["event"] == "one"


def test_the_audit_log_has_the_digest_of_a_command_and_not_the_command() -> None:
    command = {"op": "exec", "argv": ["sh", "-c", "echo secret"], "env": {"KEY": "secret"}}
    fields = asked({"op": "run", "box": "n.1", "command": command}, b"secret")
    assert "secret" not in json.dumps(fields)
    assert fields == {"box": "n.1", "command": "exec", "digest": digest(command, b"secret"), "bytes_in": 6}


@pytest.mark.parametrize("tail", [b'{"event": "ca', b"\0" * 40])
def test_the_audit_log_goes_on_in_a_line_of_its_own(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "audit"
    audit = Audit(path)
    audit.write(event="first")
    audit.close()
    with path.open("ab") as file:
        file.write(tail)
    audit = Audit(path)
    audit.write(event="second")
    audit.write(event="third")
    audit.close()
    lines = path.read_bytes().splitlines()
    assert lines[1] == tail
    assert [json.loads(line)["event"] for line in (lines[0], *lines[2:])] == ["first", "second", "third"]


def test_a_line_that_a_full_disk_cut_off_takes_no_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    audit, write = Audit(tmp_path / "audit"), os.write
    audit.write(event="first")
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:9]))
    audit.write(event="cut")
    monkeypatch.undo()
    audit.write(event="second")
    audit.close()
    lines = (tmp_path / "audit").read_text().splitlines()
    assert [json.loads(line)["event"] for line in (lines[0], lines[2])] == ["first", "second"]
    assert "cannot be written: the disk is full" in caplog.text


def test_two_who_make_a_token_at_once_have_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, make, others = tmp_path / "token", tokens.fresh_token, list[str]()

    def slow() -> tuple[str, str]:
        if not others:
            others.append("")
            others[0] = own_token(path)
        return make()

    monkeypatch.setattr(tokens, "fresh_token", slow)
    assert own_token(path) == others[0]
    assert [file.name for file in tmp_path.iterdir()] == ["token"]
