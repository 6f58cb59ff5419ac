"""Kills everything that a run of `calc` consists of, again and again: `python -m benchmarks.kills`.

SIGKILL strikes the driver, one of two processes of workers and engine, the trainer and the sandbox node
at random, each time after progress; it strikes at named places (in a checkpoint, in an update of weights,
in a tool call); and the whole machine loses power, by `benchmarks.kills_power`, which needs root. What
ends with a kill is resumed. An undisturbed run with the same settings is what the killed one is compared
with.

At the end every sample of every step must stand in the record once, the tasks must have been dispatched
in the order of the undisturbed run, no kill may cost more tokens than had waited for a flush, and the
accuracy on 1,000 tasks must be at least 0.90 and within 0.05 of the undisturbed run. `--quick` is a small
run with one kill of each kind, compared with nothing but itself. The last line is `kills K lost L
duplicated D left R`; the exit code is 1 when anything is missed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import kills_power, kills_verdict
from benchmarks.kills_places import REACHED, arm
from benchmarks.kills_power import Power
from benchmarks.kills_verdict import Tally
from benchmarks.kills_world import Stuck, World

_COMMON = ("experiment=calc", "checkpoint.every=2", "rollout.wal.fsync=true", "eval.samples=1")
_COMMON += ("logger.wandb=disabled", "logger.console=plain", "sandbox.backend=bubblewrap")
_COMMON += ("launcher.restarts=100",)  # a trainer may be killed often between two checkpoints here


@dataclass(frozen=True, slots=True)
class Size:
    """A run: its settings and how many samples it trains on; `calm` has an undisturbed one beside it."""

    settings: tuple[str, ...]
    steps: int
    groups: int
    members: int
    calm: bool


QUICK = Size(
    (*_COMMON, "sft.steps=10", "sft.batch_size=16", "trainer.steps=14", "rollout.groups_per_step=4",
     "rollout.max_in_flight=32", "algorithm.group_size=4", "eval.tasks=10", "launcher.sft_threads=1"),
    14, 4, 4, calm=False,
)  # fmt: skip
FULL = Size((*_COMMON, "eval.tasks=1000", "launcher.replicas=2"), 160, 16, 8, calm=True)


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: whose (`power`: everything at once), and at which place; without one, after progress."""

    victim: str
    place: str = ""

    @property
    def itself(self) -> bool:
        """Whether the victim is the process that comes by the place, which then kills itself."""
        trains = self.place.startswith(
            ("checkpoint.b", "checkpoint.w", "checkpoint.s", "checkpoint.m", "weights.p")
        )
        return bool(self.place) and self.victim in (("trainer",) if trains else ("worker", "engine"))

    def __str__(self) -> str:
        return f"{self.victim} at {self.place}" if self.place else self.victim


_AT_PLACES = (
    Kill("trainer", "checkpoint.written"), Kill("engine", "weights.loading"), Kill("node", "tool.running"),
    Kill("trainer", "checkpoint.sealed"), Kill("engine", "tool.running"), Kill("driver", "weights.loaded"),
    Kill("trainer", "checkpoint.moved"), Kill("engine", "weights.loaded"), Kill("worker", "tool.called"),
    Kill("trainer", "checkpoint.begun"), Kill("trainer", "weights.packed"), Kill("worker", "tool.ended"),
    Kill("driver", "weights.loading"), Kill("engine", "checkpoint.forgetting"), Kill("node", "tool.called"),
    Kill("worker", "sample.ended"), Kill("driver", "tool.running"), Kill("driver", "checkpoint.moved"),
    Kill("power", "checkpoint.written"), Kill("power", "weights.loading"),
)  # fmt: skip
"""By a checkpoint comes the trainer, but for `forgetting`; by the other places comes the engine."""


def plan(draw: random.Random, *, quick: bool, power: bool) -> list[Kill]:
    """Returns the kills in their order."""
    if quick:
        kills = [*_AT_PLACES[:3], Kill("driver")]
        return [*kills, Kill("power")] if power else kills
    at_random = [Kill("driver")] * 10
    at_random += [Kill(("worker", "engine", "trainer", "node")[number % 4]) for number in range(90)]
    kills = [*at_random, *_AT_PLACES, *([Kill("power")] * 20)]
    kills = [kill for kill in kills if power or kill.victim != "power"]
    draw.shuffle(kills)
    return kills


class Killer:
    """Kills one run by a plan and resumes it until it is done."""

    def __init__(self, world: World, power: Power | None, draw: random.Random, rest_s: float) -> None:
        self._world, self._power, self._draw, self._rest_s = world, power, draw, rest_s
        self._holders: set[int] = set()
        self.tally = Tally()

    def work(self, kills: list[Kill]) -> None:
        """Kills by the plan, then lets the run end.

        Raises:
            Stuck: It does not go on, or fails without a kill.
        """
        self._world.start()
        for number, kill in enumerate(kills, 1):
            if not self._kill(kill):
                self.tally.missed.append(str(kill))
                break
            self.tally.kills[kill.victim] += 1
            print(f"{number}/{len(kills)} {kill}: step {self._world.steps()}, "
                  f"{self.tally.tokens} tokens sampled again", flush=True)  # fmt: skip
        self._world.wait_until_ended()
        self._note_holders()
        self._count_tokens()
        if not self._world.finished():
            raise Stuck(f"the run failed without a kill:\n{self._world.tail()}")

    def _kill(self, kill: Kill) -> bool:
        """Waits for the moment and kills; False when the run was done before."""
        world = self._world
        before = world.progress()
        if not world.wait(lambda: world.progress() > before and self._victim(kill) is not None, f"{kill}"):
            return self._unexpected()
        if kill.place:
            if not self._at_place(kill):
                return self._unexpected()
        else:
            time.sleep(self._draw.uniform(0, self._rest_s))
        self._note_holders()
        if kill.victim == "power":
            self._lose_power()
        elif not kill.itself and (pid := self._victim(kill)) is not None:
            world.kill(pid)
        self._after(kill)
        return True

    def _at_place(self, kill: Kill) -> bool:
        world = self._world
        (world.kept / REACHED).unlink(missing_ok=True)
        self._note_holders()
        arm(world.kept, kill.place, die=kill.itself)
        return world.wait((world.kept / REACHED).exists, f"{kill}")

    def _victim(self, kill: Kill) -> int | None:
        return self._world.find("driver" if kill.victim == "power" else kill.victim)

    def _unexpected(self) -> bool:
        if self._world.finished():
            return False
        raise Stuck(f"the run ended without a kill:\n{self._world.tail()}")

    def _note_holders(self) -> None:
        self._holders.update(self._world.holders())

    def _lose_power(self) -> None:
        assert self._power is not None
        self._world.kill_all()
        self._power.lose()
        self._power.back()

    def _after(self, kill: Kill) -> None:
        """Waits for what comes of a kill: the run goes on by itself, or it ends and is resumed."""
        world = self._world
        if kill.victim in ("driver", "power"):
            world.wait_until_ended()
        else:
            before = world.progress()
            world.wait(lambda: world.progress() > before, f"life after {kill}")
            if not world.ended:
                return
            world.wait_until_ended()
        if not world.finished():
            self._count_tokens()
            self.tally.resumed += 1
            world.start()

    def _count_tokens(self) -> None:
        holders, self._holders = sorted(self._holders), set[int]()
        self.tally.died(*self._world.regenerated(holders), deaths=len(holders))


@contextmanager
def places(quick: bool) -> Iterator[tuple[Path, Path, Power | None]]:
    """Gives a folder for the killed run, one that no loss of power takes, and the power, if it can fail."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "kept")
        kept.mkdir()
        if why := kills_power.offered():
            print(f"no loss of power: {why}")
            yield Path(folder, "run"), kept, None
            return
        power = Power(Path(folder, "disk"), Path(folder, "run"), 512 if quick else 4096)
        power.make()
        try:
            yield power.folder, kept, power
        finally:
            power.end()


def calm_run(size: Size, folder: Path) -> Path:
    """Lets the undisturbed run end and returns its folder.

    Raises:
        Stuck: It does not end well.
    """
    folder.mkdir()
    world = World(folder, folder, size.settings)
    world.start()
    world.wait_until_ended()
    if not world.finished():
        raise Stuck(f"the undisturbed run failed:\n{world.tail()}")
    return world.run


def judge(size: Size, killer: Killer, run: Path, calm: Path | None) -> list[str]:
    """Prints the figures and returns what was missed."""
    tally, missed = killer.tally, [f"not reached: {kill}" for kill in killer.tally.missed]
    print(f"kills by victim: {dict(tally.kills)}; resumed {tally.resumed} times; "
          f"{kills_verdict.retried(run)} attempts failed for infrastructure and were made again")  # fmt: skip
    print(f"tokens sampled again: {tally.tokens}, at most {tally.worst} after one kill; "
          f"at most {tally.interval} waited for a flush at once")  # fmt: skip
    if tally.over:
        missed.append(f"{tally.over} kills cost more tokens than one flush interval")
    groups = size.steps * size.groups
    if calm is not None:
        ours, theirs = kills_verdict.accuracy(run), kills_verdict.accuracy(calm)
        print(f"accuracy on 1,000 tasks: {ours:.3f}, undisturbed {theirs:.3f}")
        if ours < 0.90 or abs(ours - theirs) > 0.05:
            missed.append("accuracy")
        if not kills_verdict.same_order(run, calm, groups):
            missed.append("order of tasks")
    elif len(dispatched := kills_verdict.order(run)) < groups or dispatched != sorted(dispatched):
        missed.append("order of tasks")
    return missed


def left(world: World) -> int:
    """Waits for what may still be ending, and returns how many processes do not."""
    deadline = time.monotonic() + 60
    while world.processes() and time.monotonic() < deadline:
        time.sleep(0.2)
    return len(world.processes())


def main() -> int:
    """Runs, kills, resumes and counts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small run with one kill of each kind")
    parser.add_argument("--kills", type=int, default=0, help="only so many of the planned kills")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    size, draw = QUICK if arguments.quick else FULL, random.Random(arguments.seed)
    with places(arguments.quick) as (root, kept, power):
        kills = plan(draw, quick=arguments.quick, power=power is not None)
        world = World(root, kept, size.settings)
        killer = Killer(world, power, draw, 1.0 if arguments.quick else 3.0)
        try:
            killer.work(kills[: arguments.kills or None])
            calm = calm_run(size, kept / "calm") if size.calm else None
            lost, duplicated = kills_verdict.samples(world.run, size.steps * size.groups * size.members)
            remains = left(world)
            missed = judge(size, killer, world.run, calm)
        except Stuck as error:
            print(error)
            return 1
        finally:
            world.kill_all()
    for text in missed:
        print(f"MISS {text}")
    print(f"kills {killer.tally.kills.total()} lost {lost} duplicated {duplicated} left {remains}")
    return int(bool(missed or lost or duplicated or remains))


if __name__ == "__main__":
    sys.exit(main())
