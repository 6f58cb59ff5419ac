"""Callers and nodes that die: what finished is answered from the journal, what did not is unknown."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import pytest

from sandbox.client import Fleet, RemoteBox
from sandbox.errors import JournalMismatchError, LostError, PolicyError, UnknownOutcomeError
from sandbox.journal import Journal
from sandbox.journal_file import scan
from sandbox.outcome import Outcome
from sandbox.types import ExecResult, Limits, SandboxSpec

Alive = Callable[[Iterable[psutil.Process]], list[psutil.Process]]
ROOT = str(Path(__file__).parents[2])
SMALL = SandboxSpec(limits=Limits(memory_bytes=64 << 20))
COUNT = "echo x >> /workspace/log; wc -l < /workspace/log"
"""A command whose result tells how often it ran."""
SLEEP = "echo in | tee -a /workspace/in; sleep 77"


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    """A state folder of this test alone, whose node is ended."""
    yield tmp_path
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "sandbox.node" in command and str(tmp_path) in command:
            process.terminate()
            process.wait(20)


def client(state_dir: Path, body: str) -> tuple[subprocess.Popen[str], list[str]]:
    """A client of the owner `me` in a process of its own, and the words that it printed before it hung."""
    source = f"""
import asyncio
from pathlib import Path
from sandbox.client import Fleet
from sandbox.types import Limits, SandboxSpec

async def main():
    fleet = await Fleet.connect("local", backend="bubblewrap", state_dir=Path({str(state_dir)!r}), owner="me")
    box = await fleet.create(SandboxSpec(limits=Limits(memory_bytes=64 << 20)))
{textwrap.indent(textwrap.dedent(body), "    ")}
    print(box.id, fleet.node_pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    process = subprocess.Popen(
        [sys.executable, "-c", source],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    assert process.stdout is not None
    return process, process.stdout.readline().split()


async def crash(state_dir: Path, body: str) -> tuple[str, int]:
    """Runs a client and kills it once it has said all; returns its sandbox and its node."""
    process, (box, node) = await asyncio.to_thread(client, state_dir, body)
    process.kill()
    await asyncio.to_thread(process.communicate)
    return box, int(node)


async def connect(state_dir: Path, owner: str = "me") -> Fleet:
    return await Fleet.connect("local", backend="bubblewrap", state_dir=state_dir, owner=owner)


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def records(state_dir: Path, box: str, kind: str) -> list[int]:
    return [
        found.record["seq"] for found in scan(state_dir / "journals" / box) if found.record["kind"] == kind
    ]


async def sequence(box: RemoteBox) -> list[ExecResult]:
    return [
        await box.exec(COUNT),
        await box.python("import time; print(time.time_ns())"),
        await box.exec("echo no >&2; exit 3"),
    ]


SEQUENCE = f"""
for call in (box.exec({COUNT!r}), box.python("import time; print(time.time_ns())"),
             box.exec("echo no >&2; exit 3")):
    await call
await box.write_file("/workspace/a", b"one")
assert await box.read_file("/workspace/a") == b"one"
await box.write_file("/workspace/a", b"two")
"""


async def test_finished_commands_return_their_results_without_running(own: Path) -> None:
    box_id, _ = await crash(own, SEQUENCE)
    async with await connect(own) as fleet:
        box = await fleet.attach(box_id)
        assert (box.generation, box.replayed) == (1, 0)
        first, second, third = await sequence(box)
        assert (first.exit_code, first.stdout, third.exit_code, third.stderr) == (0, b"1\n", 3, b"no\n")
        await box.write_file("/workspace/a", b"one")
        assert await box.read_file("/workspace/a") == b"one"  # as it was then
        await box.write_file("/workspace/a", b"two")
        assert (await box.exec(COUNT)).stdout == b"2\n"  # the first that is new
        assert await box.read_file("/workspace/a") == b"two"
        again = await fleet.attach(box_id)
        assert [first, second, third] == await sequence(again)
        assert records(own, box_id, "intent") == list(range(1, 9)) and not records(own, box_id, "rerun")


async def test_another_sequence_is_a_hard_error(own: Path) -> None:
    box_id, _ = await crash(own, SEQUENCE)
    async with await connect(own) as fleet:
        box = await fleet.attach(box_id)
        assert (await box.exec(COUNT)).stdout == b"1\n"
        with pytest.raises(JournalMismatchError, match=r"command 2 \(exec echo other\).*python"):
            await box.exec("echo other")


async def test_a_command_in_flight_is_unknown(own: Path) -> None:
    body = f"""
    await box.exec({COUNT!r})
    for idempotent in (False, True):
        asyncio.create_task(box.exec({SLEEP!r}, idempotent=idempotent))
    await asyncio.sleep(0)
    while (await box.exec("wc -l < /workspace/in")).stdout != b"2\\n":
        pass
    """
    box_id, _ = await crash(own, body)
    async with await connect(own) as fleet:
        box = await fleet.attach(box_id)
        await box.exec(COUNT)
        with pytest.raises(UnknownOutcomeError, match="was under way"):
            await box.exec(SLEEP)
        box = await fleet.attach(box_id, unknown="rerun_if_idempotent")
        await box.exec(COUNT)
        with pytest.raises(UnknownOutcomeError):
            await box.exec(SLEEP)
        result = await box.exec(SLEEP, timeout_s=3)
        assert result.timed_out and result.stdout == b"in\n"
        assert records(own, box_id, "rerun") == [3]


async def test_the_caller_may_be_asked(own: Path) -> None:
    body = f"""
    await box.exec({COUNT!r})
    for _ in range(3):
        asyncio.create_task(box.exec({COUNT + "; sleep 77"!r}))
    await asyncio.sleep(0)
    while (await box.exec("wc -l < /workspace/log")).stdout != b"4\\n":
        pass
    """
    box_id, _ = await crash(own, body)
    asked: list[int] = []

    async def ask(seq: int, error: UnknownOutcomeError) -> str:
        asked.append(seq)
        return ("accept", "rerun", "fail")[len(asked) - 1]

    async with await connect(own) as fleet:
        with pytest.raises(PolicyError, match="ask"):
            await fleet.attach(box_id, unknown="ask")
        box = await fleet.attach(box_id, unknown="ask", ask=ask)  # type: ignore[arg-type]
        await box.exec(COUNT)
        assert await box.exec(COUNT + "; sleep 77") == ExecResult(None, b"", b"")
        assert (await box.exec(COUNT + "; sleep 77", timeout_s=3)).stdout == b"5\n"
        with pytest.raises(UnknownOutcomeError):
            await box.exec(COUNT + "; sleep 77")
        assert asked == [2, 3, 4]


async def test_a_command_that_still_runs_for_another_is_left_alone(own: Path) -> None:
    async with await connect(own) as fleet:
        box = await fleet.create(SMALL)
        running = asyncio.create_task(box.exec("sleep 0.5; echo done"))
        await asyncio.sleep(0)
        await box.exec("true")
        other = await fleet.attach(box.id, unknown="ask", ask=lambda *_: pytest.fail("asked"))
        with pytest.raises(UnknownOutcomeError, match="still running"):
            await other.exec("sleep 0.5; echo done")
        assert (await running).stdout == b"done\n"
        assert (await (await fleet.attach(box.id)).exec("sleep 0.5; echo done")).stdout == b"done\n"


async def test_after_the_nodes_death_a_fresh_generation_replays(own: Path) -> None:
    box_id, node = await crash(own, SEQUENCE)
    os.kill(node, signal.SIGKILL)
    async with await connect(own) as fleet:
        assert fleet.node_pid != node
        with pytest.raises(LostError, match="replay=True"):
            await fleet.attach(box_id)
        box = await fleet.attach(box_id, replay=True)
        assert (box.generation, box.replayed) == (2, 5)  # the read is no change
        first, _, third = await sequence(box)
        assert (first.stdout, third.exit_code) == (b"1\n", 3)
        await box.write_file("/workspace/a", b"one")
        assert await box.read_file("/workspace/a") == b"one"
        await box.write_file("/workspace/a", b"two")
        assert (await box.exec(COUNT)).stdout == b"2\n"
        assert await box.read_file("/workspace/a") == b"two"
        assert records(own, box_id, "intent") == list(range(1, 9))


async def test_a_replay_that_ends_differently_is_a_hard_error(own: Path) -> None:
    async with await connect(own) as fleet:
        box = await fleet.create(SMALL)
        await box.exec("true")
        node = fleet.node_pid
        os.kill(node, signal.SIGKILL)
    path = own / "journals" / box.id
    journal = Journal.open(path)
    journal.finish(
        journal.intend(
            {"op": "exec", "argv": ["false"], "env": {}, "cwd": "/", "timeout_s": 9, "limit": 9},
            b"",
            idempotent=False,
        ),
        Outcome(ExecResult(0, b"", b"")),
    )
    journal.close()
    async with await connect(own) as fleet:
        with pytest.raises(JournalMismatchError, match=r"command 2 \(exec false\) gave 1, not 0"):
            await fleet.attach(box.id, replay=True)
        assert await fleet.boxes() == []
        assert Journal.open(path).generation == 1


async def test_a_lease_that_ended_leaves_the_journal(own: Path) -> None:
    fleet = await Fleet.connect("local", backend="bubblewrap", state_dir=own, owner="me", lease_s=0.2)
    box = await fleet.create(SMALL)
    await box.exec(COUNT)
    await fleet.close(release=False)
    async with await connect(own, "other") as other:
        await until(lambda: not records(own, box.id, "rerun") and bool(records(own, box.id, "result")))
        async with asyncio.timeout(60):
            while "me" in (await other._connection.request({"op": "owners"}))[0]["owners"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        with pytest.raises(LostError):
            await other.attach(box.id, replay=True)  # somebody else's
        async with await connect(own) as fleet:
            box = await fleet.attach(box.id, replay=True)
            assert (box.generation, (await box.exec(COUNT)).stdout) == (2, b"1\n")


async def test_journals_go_with_their_sandboxes(own: Path) -> None:
    folder = own / "journals"
    async with await connect(own) as fleet:
        closed, released = await fleet.create(SMALL), await fleet.create(SMALL)
        silent = await fleet.create(SandboxSpec(limits=SMALL.limits, journal=False))
        assert {path.name for path in folder.iterdir()} == {closed.id, released.id}
        assert folder.stat().st_mode & 0o777 == 0o700
        with pytest.raises(PolicyError, match="journal=True"):
            await silent._connection.request(
                {
                    "op": "run",
                    "box": silent.id,
                    "command": {"op": "exec", "argv": ["true"], "env": {}, "timeout_s": 5.0, "limit": 9},
                    "claim": {"seq": 1},
                }
            )
        await closed.close()
        assert {path.name for path in folder.iterdir()} == {released.id}
        for name in ("../node.json", "..", closed.id):
            with pytest.raises(LostError):
                await fleet.attach(name, replay=True)
    assert not list(folder.iterdir())


async def test_a_creation_with_a_key_happens_once(own: Path) -> None:
    async with await connect(own) as fleet:
        made = await asyncio.gather(*(fleet.create(SMALL, key="step-3") for _ in range(4)))
        assert len({box.id for box in made}) == 1 and len(await fleet.boxes()) == 1
        assert (await fleet.create(SMALL, key="step-4")).id != made[0].id
        async with await connect(own, "other") as other:
            assert (await other.create(SMALL, key="step-3")).id != made[0].id


async def test_old_journals_are_swept(own: Path) -> None:
    folder = own / "journals"
    for name in ("old", "fresh"):
        Journal.create(folder / name, {"sandbox": name, "owner": "me"}).close()
    os.utime(folder / "old", (1e9, 1e9))
    async with await connect(own):
        await until(lambda: {path.name for path in folder.iterdir()} == {"fresh"})


async def test_a_snapshot_and_the_tail_after_it_are_enough(own: Path) -> None:
    body = f"""
    await box.exec({COUNT!r})
    await box.start("sleep 77")
    await box.snapshot()
    await box.exec({COUNT!r})
    """
    box_id, node = await crash(own, body)
    os.kill(node, signal.SIGKILL)
    async with await connect(own) as fleet:
        box = await fleet.attach(box_id, replay=True)
        assert (box.generation, box.replayed) == (2, 1)
        assert (await box.exec(COUNT)).stdout == b"1\n"
        assert (await box.start("sleep 77")).number == 1
        assert (await box.exec(COUNT)).stdout == b"2\n"
        assert (await box.exec(COUNT)).stdout == b"3\n"
        assert (await box.start("true")).number == 2


async def test_a_fork_attaches_by_itself(own: Path) -> None:
    async with await connect(own) as fleet:
        box = await fleet.create(SMALL)
        await box.exec(COUNT)
        (child,) = await box.fork()
        await child.exec(COUNT)
        os.kill(fleet.node_pid, signal.SIGKILL)
    async with await connect(own) as fleet:
        again = await fleet.attach(child.id, replay=True)
        assert again.replayed == 2
        assert [(await again.exec(COUNT)).stdout for _ in range(3)] == [b"1\n", b"2\n", b"3\n"]
        head = Journal.open(own / "journals" / child.id).head
        assert (head["parent"], head["parent_seq"]) == (box.id, 1)


async def test_a_paused_sandbox_ends_with_its_node(own: Path, alive: Alive) -> None:
    async with await connect(own) as fleet:
        if not fleet.capabilities.pause:
            pytest.skip("no freezer here")
        box = await fleet.create(SMALL)
        tree = psutil.Process(fleet.node_pid).children(recursive=True)
        await box.pause()
        os.kill(fleet.node_pid, signal.SIGKILL)
    async with await connect(own):
        await until(lambda: not alive(tree))


async def test_a_deletion_whose_caller_goes_away_holds_up_nobody(own: Path) -> None:
    async with await Fleet.connect("local", backend="bubblewrap", state_dir=own, owner="me") as fleet:
        for pause_s in (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008):
            box = await fleet.create(SMALL)
            (await box.exec(COUNT)).check()
            closing = asyncio.create_task(box.close())
            await asyncio.sleep(pause_s)
            attaching = asyncio.create_task(fleet.attach(box.id, replay=True))
            await asyncio.sleep(pause_s)
            closing.cancel()
            async with asyncio.timeout(60):
                try:
                    found = await attaching
                    assert found.generation == 1 and (await found.exec(COUNT)).stdout == b"1\n"
                    await found.close()
                except LostError as error:  # deleted before, or as soon as it had been found
                    assert re.search("neither a sandbox|has no sandbox|sandbox was closed", str(error))
        assert not await fleet.boxes()
