"""Processes as their users see them: how they start and end when somebody goes away meanwhile."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rl import actors, crew
from rl.actors import Cluster, Host, Process
from rl.placement import Bundle
from rl.restarts import ProcessDiedError


async def test_who_stops_second_waits_until_the_object_is_closed() -> None:
    closing, closed = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def slow():
        yield object()
        closing.set()
        await asyncio.sleep(0.05)
        closed.set()

    host = Host()
    await host.start(slow)
    notice = asyncio.create_task(host.stop())
    await closing.wait()
    await host.stop()
    assert closed.is_set()
    await notice


class SlowStart:
    """What Ray gives for an actor whose object takes for ever to open."""

    def __init__(self) -> None:
        self.start, self.asked = self, asyncio.Event()

    def options(self, **options: Any) -> SlowStart:
        return self

    def remote(self, *args: Any) -> Any:
        if args and isinstance(args[0], str):
            return self
        self.asked.set()
        return asyncio.get_running_loop().create_future()


class Anywhere:
    def options(self, bundle: Bundle) -> dict[str, Any]:
        return {}


async def test_a_process_that_nobody_waits_for_any_more_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor, killed = SlowStart(), list[Any]()
    monkeypatch.setattr(actors.ray, "remote", lambda kind: actor)
    monkeypatch.setattr(ray, "kill", killed.append)
    cluster = Cluster(tmp_path, Anywhere())  # type: ignore[arg-type]
    opening = asyncio.create_task(cluster.open("generator", Bundle("generator", {}), lambda: None))  # type: ignore[arg-type, return-value]
    await actor.asked.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert killed == [actor]


class Stuck(Process):
    """A process that does not stop by itself."""

    def __init__(self) -> None:
        super().__init__("generator", Host())
        self.killed = False

    async def stop(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def kill(self) -> None:
        self.killed = True


async def test_a_process_that_does_not_stop_is_killed_so_that_another_can_have_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "_STOP_S", 0.01)
    notes, stuck, unused = list[str](), Stuck(), Any
    watch: Any = SimpleNamespace(note=notes.append)
    await crew.Crew(unused, unused, watch, unused, unused)._stop(stuck)  # type: ignore[arg-type]
    assert stuck.killed and "the generator did not stop cleanly (TimeoutError" in notes[0]


class Gone:
    """An actor whose calls end with an error of Ray; whether it still lives is asked by a ping."""

    def __init__(self, error: BaseException, lives: bool) -> None:
        self.call, self.ping = SimpleNamespace(remote=self._fail), SimpleNamespace(remote=self._ping)
        self._error, self._alive = error, lives

    async def _fail(self, *args: Any) -> None:
        raise self._error

    async def _ping(self) -> None:
        if not self._alive:
            raise ray.exceptions.ActorDiedError


@pytest.mark.parametrize("lives", [True, False])
@pytest.mark.parametrize(
    "error",
    [
        ray.exceptions.ActorDiedError(),
        ray.exceptions.ObjectLostError("ab" * 28, None, ""),
        ray.exceptions.OwnerDiedError("ab" * 28, None, ""),
        ray.exceptions.NodeDiedError("the node is gone"),
        ray.exceptions.WorkerCrashedError(),
    ],
)
async def test_whatever_a_lost_node_takes_along_is_a_death(error: BaseException, lives: bool) -> None:
    process = actors.ActorProcess("trainer", Gone(error, lives))
    with pytest.raises(ProcessDiedError) as caught:
        await process.call("step")
    assert caught.value.role == ("process that another one waits for" if lives else "trainer")
