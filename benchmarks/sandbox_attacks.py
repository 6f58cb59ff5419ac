"""Attacks on sandboxes of every isolation tier of this machine; host and siblings are looked at after each.

    python -m benchmarks.sandbox_attacks [--tier T] [--only PATTERN] [--off PROTECTION]... [--list]

An attack holds when it does not get what it is after and everything beside it is as before: a sibling answers
quickly and rightly, the node has not grown, and of the attacked sandbox no process, control group, mount
or container is left. `-` stands where a tier says, by a capability flag, that it does not claim to hold an
attack. `--off` switches a protection off in the benchmark's own node, which the attacks must then find. The
last line is `held H/N`; the exit status is 1 when H is less than N.
"""

from __future__ import annotations

import argparse
import asyncio
import fnmatch
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import (
    sandbox_attack_agent,
    sandbox_attack_control,
    sandbox_attack_disk,
    sandbox_attack_escape,
    sandbox_attack_files,
    sandbox_attack_memory,
    sandbox_attack_network,
    sandbox_attack_processes,
    sandbox_attack_sessions,
    sandbox_attack_siblings,
    sandbox_attack_storms,
    sandbox_attack_verify,
)
from benchmarks.sandbox_attack_kit import SPEC, Attack, NotHeld, Scene, Stage
from benchmarks.sandbox_attack_protections import PROTECTIONS
from sandbox.backends.registry import backends
from sandbox.client import RemoteBox
from sandbox.errors import LostError, PolicyError, SandboxError

ATTACKS: tuple[Attack, ...] = tuple(
    attack
    for module in (
        sandbox_attack_processes, sandbox_attack_memory, sandbox_attack_disk, sandbox_attack_files,
        sandbox_attack_escape, sandbox_attack_siblings, sandbox_attack_control, sandbox_attack_agent,
        sandbox_attack_sessions, sandbox_attack_network, sandbox_attack_storms,
        sandbox_attack_verify,
    )
    for attack in module.TABLE.attacks
)  # fmt: skip
HELD, FELL, UNCLAIMED = "held", "FELL", "-"
_ATTACK_S = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one attack ended on one tier, and what it did."""

    state: str
    why: str = ""
    seconds: float = 0.0


def lacking(attack: Attack, stage: Stage) -> str:
    """Returns the capabilities that the attack needs and the tier says it does not have."""
    have = stage.fleet.capabilities
    return " ".join(name for name in attack.needs if getattr(have, name.lstrip("!")) is name.startswith("!"))


async def launch(attack: Attack, stage: Stage, box: RemoteBox) -> Outcome:
    """Runs one attack in a fresh sandbox, closes all that it opened, and looks at host and siblings."""
    scene, start, why, state = Scene(stage, box), time.monotonic(), "", HELD
    try:
        async with asyncio.timeout(_ATTACK_S):
            await attack.run(scene)
    except NotHeld as error:
        why = str(error)
    except PolicyError as error:
        why = f"it was refused: {error}"
        if not stage.fleet.capabilities.stateful:  # what needs state is not on offer, nor attacked
            why, state = "", UNCLAIMED
    except LostError as error:
        if stage.fleet.capabilities.oom_told:  # a tier without it says that it ends as a whole
            why = f"the sandbox ended: {error}"
    except Exception as error:  # whatever is not a typed refusal is a hole, too
        why = f"{type(error).__name__}: {error}"
    boxes = [box, *scene.opened]
    await asyncio.gather(*(each.close() for each in boxes), return_exceptions=True)
    why = why or await stage.wounds([each.id for each in boxes])
    return Outcome(FELL if why else state, why, time.monotonic() - start)


async def assault(tier: str, attacks: list[Attack], off: tuple[str, ...]) -> dict[str, Outcome]:
    """Runs the attacks on one tier; a stage that an attack has broken is built anew for the next."""
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix=f"attacks-{tier}-") as folder:
        stage = Stage(tier, Path(folder) / "0", off)
        await stage.open()
        for number, attack in enumerate(attacks):
            if flags := lacking(attack, stage):
                outcome = Outcome(UNCLAIMED, f"by its flags, without {flags}")
            else:
                try:
                    outcome = await launch(attack, stage, await stage.fleet.create(SPEC))
                except SandboxError as error:
                    outcome = Outcome(FELL, f"no sandbox could be had: {error}")
            outcomes[attack.name] = outcome
            show(tier, number + 1, len(attacks), attack, outcome)
            if outcome.state == FELL:
                await stage.abandon()
                stage = Stage(tier, Path(folder) / str(number + 1), off)
                await stage.open()
        if left := await stage.close():
            outcomes["the end"] = Outcome(FELL, f"left behind: {', '.join(left)}")
    return outcomes


def show(tier: str, number: int, count: int, attack: Attack, outcome: Outcome) -> None:
    """Prints a line of progress."""
    case = f" [{attack.case}]" if attack.case else ""
    end = f": {outcome.why}" if outcome.why else ""
    print(
        f"{tier} {number}/{count} {outcome.seconds:5.1f} s  {outcome.state:4}  {attack.name}{case}{end}",
        flush=True,
    )


def matrix(attacks: list[Attack], results: dict[str, dict[str, Outcome]]) -> str:
    """Returns the table of attacks and tiers, by kind."""
    tiers = list(results)
    wide = max(len(attack.name) for attack in attacks) + 8
    lines = [" " * wide + "".join(f"{tier:>13}" for tier in tiers)]
    kind = ""
    for attack in attacks:
        if attack.kind != kind:
            kind = attack.kind
            lines.append(kind)
        name = f"  {attack.name}" + (f" [{attack.case}]" if attack.case else "")
        lines.append(f"{name:{wide}}" + "".join(f"{results[tier][attack.name].state:>13}" for tier in tiers))
    return "\n".join(lines)


async def present(wanted: str) -> list[str]:
    """Returns the tiers that this machine has, of those wanted; says what the others lack."""
    names: list[str] = []
    for name, backend in backends().items():
        if not fnmatch.fnmatch(name, wanted):
            continue
        if problem := await backend.missing():
            print(f"{name}: not here ({problem})")
        else:
            names.append(name)
        backend.leave()
    return names


async def run(tiers: str, only: str, off: tuple[str, ...]) -> bool:
    """Runs all and prints; returns whether all that the tiers claim held."""
    for name in off:  # archives are read by the client, which is this process
        PROTECTIONS[name].switch_off()
    attacks = [attack for attack in ATTACKS if fnmatch.fnmatch(attack.name, only) or attack.kind == only]
    start = time.monotonic()
    results = {tier: await assault(tier, attacks, off) for tier in await present(tiers)}
    if not attacks or not results:
        print(f"nothing to do: {len(attacks)} attacks match {only!r}, {len(results)} tiers match {tiers!r}")
        return False
    print(f"\n{matrix(attacks, results)}\n")
    outcomes = [(tier, name, outcome) for tier, all_ in results.items() for name, outcome in all_.items()]
    for tier, name, outcome in outcomes:
        if outcome.state == FELL:
            print(f"{tier}: {name}: {outcome.why}")
    claimed = [outcome for _, _, outcome in outcomes if outcome.state != UNCLAIMED]
    held = sum(outcome.state == HELD for outcome in claimed)
    if off:
        print(f"switched off: {', '.join(off)}")
    print(f"{len(attacks)} attacks, {len(results)} tiers, {time.monotonic() - start:.0f} s")
    print(f"held {held}/{len(claimed)}")
    return held == len(claimed)


def listing() -> str:
    """Returns the attacks and the protections in words."""
    lines = [f"{a.kind}: {a.name}{f' [{a.case}]' if a.case else ''}: {a.what}" for a in ATTACKS]
    return "\n".join([*lines, "", *(f"--off {p.name}: {p.what} ({p.attack})" for p in PROTECTIONS.values())])


def main() -> None:
    """Attacks, and prints what held."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tier", default="*", help="tiers by name or pattern")
    parser.add_argument("--only", default="*", help="attacks by name or pattern, or a kind of them")
    parser.add_argument("--off", action="append", default=[], choices=PROTECTIONS, metavar="PROTECTION")
    parser.add_argument("--list", action="store_true", help="print attacks and protections, and end")
    arguments = parser.parse_args()
    if arguments.list:
        print(listing())
        return
    sys.exit(0 if asyncio.run(run(arguments.tier, arguments.only, tuple(arguments.off))) else 1)


if __name__ == "__main__":
    main()
