"""The lease file: durable before anybody hears of it, and what a killed node's successor makes of it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sandbox.client import Fleet
from sandbox.errors import InfrastructureError, JournalError, LostError, RefusedError
from sandbox.journal_file import encode
from sandbox.leases import FILE, LEASES, Lease, LeaseFile
from sandbox.node import Owner
from sandbox.types import Limits, SandboxSpec

SMALL = SandboxSpec(limits=Limits(memory_bytes=64 << 20))
GOLDEN = Path(__file__).parent / "golden"


def lease(number: int = 1, owner: str = "me", **fields: str) -> Lease:
    return Lease(f"s{number}", f"s{number}", owner, 60.0, fields.get("key", ""), "bubblewrap", "boot")


async def test_what_is_held_outlives_the_node(tmp_path: Path) -> None:
    leases = LeaseFile.open(tmp_path, "one")
    await leases.hold(lease(1, key="k"), lease(2), lease(3, owner=""))
    await leases.end("s2", "unknown")
    await leases.close()
    after = LeaseFile.open(tmp_path, "two")
    assert after.lost == {"s1": lease(1, key="k")} and not after.live  # nobody's ended with their node
    assert after.by_key("me", "k") == lease(1, key="k")
    assert after.by_key("other", "k") is None and after.by_key("me", "") is None
    assert after.expired({}) == [] and [one.sandbox for one in after.of("me")] == ["s1"]
    renewed = Lease("s1", "s1-g2", "me", 60.0, "k", "bubblewrap", "two")
    await after.hold(renewed)
    assert after.live == {"s1": renewed} and not after.lost
    await after.close()


async def test_many_wait_for_one_write(tmp_path: Path) -> None:
    leases = LeaseFile.open(tmp_path, "boot")
    await asyncio.gather(*(leases.hold(lease(number)) for number in range(200)))
    assert leases.syncs <= 10
    await leases.close()
    assert len(LeaseFile.open(tmp_path, "next").lost) == 200


@pytest.mark.parametrize("cut", [1, 7, 40])
async def test_a_torn_group_is_not_held(tmp_path: Path, cut: int) -> None:
    leases = LeaseFile.open(tmp_path, "boot")
    await leases.hold(lease(1))
    await leases.hold(lease(2), lease(3))
    await leases.close()
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:-cut])
    assert set(LeaseFile.open(tmp_path, "next").lost) == {"s1"}


async def test_what_stands_behind_damage_counts_as_expired(tmp_path: Path) -> None:
    leases = LeaseFile.open(tmp_path, "boot")
    for number in (1, 2, 3):
        await leases.hold(lease(number))
    await leases.close()
    path = tmp_path / FILE
    data = bytearray(path.read_bytes())
    data[data.index(b'"s2"') + 1] ^= 1
    path.write_bytes(data)
    assert set(LeaseFile.open(tmp_path, "next").lost) == {"s1"}
    assert (tmp_path / f"{FILE}.damaged").read_bytes() == data


@pytest.mark.parametrize(
    "record", [{"no": 1}, {"kind": "held"}, {"kind": "held", "leases": [{"sandbox": "s9"}]}]
)
async def test_a_record_that_is_none_stops_no_node(tmp_path: Path, record: dict[str, object]) -> None:
    leases = LeaseFile.open(tmp_path, "boot")
    await leases.hold(lease(1))
    await leases.close()
    with (tmp_path / FILE).open("ab") as file:
        file.write(encode(record))
    assert set(LeaseFile.open(tmp_path, "next").lost) == {"s1"}
    assert (tmp_path / f"{FILE}.damaged").exists()


def test_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(LEASES.magic + (LEASES.version + 1).to_bytes(2, "big"))
    with pytest.raises(JournalError, match="format 2, and 1 to 1 are read here"):
        LeaseFile.open(tmp_path, "boot")


def test_the_file_of_version_1_is_read(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(base64.b64decode((GOLDEN / "leases-1.b64").read_text()))
    held = LeaseFile.open(tmp_path, "next").lost
    assert held == {
        "b0-1": Lease("b0-1", "b0-1", "lab:me", 60.0, "task 7", "docker", "b0", "pool1", True),
        "b0-3": Lease("b0-3", "b0-3-g2", "lab:me", 5.5, "", "bubblewrap", "b0", "", False),
    }


async def test_a_long_file_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox.leases._COMPACT", 4096)
    leases = LeaseFile.open(tmp_path, "boot")
    await leases.hold(lease(0, key="kept"))
    for number in range(1, 60):
        await leases.hold(lease(number))
        await leases.end(f"s{number}")
    await leases.close()
    assert (tmp_path / FILE).stat().st_size < 8192
    assert set(LeaseFile.open(tmp_path, "next").lost) == {"s0"}


async def test_a_full_disk_holds_nothing() -> None:
    leases = LeaseFile(Path("/dev/full"), "boot", _fd=os.open("/dev/full", os.O_RDWR))
    with pytest.raises(InfrastructureError, match="No space left"):
        await leases.hold(lease(1))
    assert not leases.live
    await leases.close()


# --- a node that is killed


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    """A state folder of this test alone, whose nodes are ended."""
    yield tmp_path
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "sandbox.node" in process.cmdline() and str(tmp_path) in process.cmdline():
                process.terminate()
                process.wait(20)


async def connect(state_dir: Path, lease_s: float = 60.0, backend: str = "bubblewrap") -> Fleet:
    return await Fleet.connect(state_dir=state_dir, owner="me", backend=backend, lease_s=lease_s)


async def killed(fleet: Fleet) -> None:
    os.kill(fleet.node_pid, signal.SIGKILL)
    while psutil.pid_exists(fleet.node_pid):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    await fleet.close()


@pytest.mark.parametrize(
    "kind", ["bubblewrap", pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.slow])]
)
async def test_a_key_outlives_the_node(own: Path, kind: str) -> None:
    fleet = await connect(own, backend=kind)
    box = await fleet.create(SMALL, key="task 7")
    assert (await box.exec("echo x >> count; cat count")).stdout == b"x\n"
    await killed(fleet)
    async with await connect(own, backend=kind) as fleet:
        first, second = await asyncio.gather(*(fleet.create(SMALL, key="task 7") for _ in range(2)))
        assert first.id == second.id == box.id and (first.generation, second.generation) == (2, 2)
        assert (await first.exec("cat count")).stdout == b"x\n"  # made anew from its journal, once
        assert [one.id for one in await fleet.boxes()] == [box.id]
        again = await fleet.attach(box.id)
        assert again.generation == 2


async def test_a_group_outlives_the_node_whole(own: Path) -> None:
    fleet = await connect(own)
    group = [box.id for box in await fleet.claim(SMALL, 2, key="group")]
    await killed(fleet)
    async with await connect(own) as fleet:
        again = await fleet.claim(SMALL, 2, key="group")
        assert [box.id for box in again] == group and {box.generation for box in again} == {2}


async def test_what_is_made_anew_counts_in_the_quota(own: Path) -> None:
    """Sandboxes that ended by themselves do not come back beside as many others as the project may hold."""
    share = {"project": "me", "quota": {"sandboxes": 1}, "elsewhere": []}
    async with await connect(own) as fleet:
        box = await fleet.create(SMALL)
        await box.extend(0.2)
        while await fleet.boxes():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        held = await fleet.create(SMALL)
        again = {"op": "attach", "box": box.id, "replay": True, "shares": [share]}
        with pytest.raises(RefusedError, match="quota of project me") as caught:
            await fleet._connection.request(again)
        assert caught.value.reason == "quota"
        await held.close()
        assert (await fleet._connection.request(again))[0]["generation"] == 2


async def test_what_had_no_journal_is_lost_by_name(own: Path) -> None:
    fleet = await connect(own)
    await fleet.create(SandboxSpec(limits=SMALL.limits, journal=False), key="bare")
    await killed(fleet)
    async with await connect(own) as fleet:
        with pytest.raises(LostError, match="had no journal"):
            await fleet.create(SMALL, key="bare")


async def test_a_closed_sandbox_frees_its_key(own: Path) -> None:
    fleet = await connect(own)
    box = await fleet.create(SMALL, key="k")
    await box.close()
    await killed(fleet)
    async with await connect(own) as fleet:
        assert (await fleet.create(SMALL, key="k")).id != box.id


async def test_a_lease_is_not_made_shorter(own: Path) -> None:
    async with await connect(own, lease_s=600.0) as first:
        box = await first.create(SMALL)
        assert (first.lease_s, box.lease_s, box.ttl_s) == (600.0, 600.0, SMALL.ttl_s)
        second = await connect(own, lease_s=1.0)
        assert second.lease_s == 600.0
        await second.close(release=False)
        await box.extend(77.0)
        assert box.ttl_s == 77.0
        await box.exec("true")
        assert (box.ttl_s, box.lease_s) == (77.0, 600.0)


def test_leases_do_not_follow_the_clock_on_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner(60.0)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert not owner.expired() and 59 < owner.left() <= 60
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert not owner.expired()
    owner.seen -= 61
    assert owner.expired()


async def test_looking_is_not_use(own: Path) -> None:
    async with await connect(own) as fleet:
        box = await fleet.create(SandboxSpec(limits=SMALL.limits, ttl_s=1.5))
        until = time.monotonic() + 60
        with pytest.raises(LostError):
            while time.monotonic() < until:
                await fleet.boxes()  # as an operator's `ls` and `top` do
                await fleet._connection.request({"op": "top"})  # pyright: ignore[reportPrivateUsage]
                await fleet._connection.request({"op": "describe", "box": box.id})  # pyright: ignore
                await asyncio.sleep(0.1)
