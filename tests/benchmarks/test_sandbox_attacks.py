"""The attacks find what is switched off, each protection of them, and hold when nothing is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.sandbox_attack_protections import PROTECTIONS
from benchmarks.sandbox_attacks import ATTACKS, listing

QUICK = ("no-network", "toolkit-mount")


def attack(*options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "benchmarks.sandbox_attacks", "--tier", "bubblewrap", *options]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=600)
    return done.returncode, done.stdout.rstrip().rpartition("\n")[2]


@pytest.mark.parametrize(
    "protection",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PROTECTIONS],
)
def test_a_protection_that_is_off_is_found(protection: str) -> None:
    only = PROTECTIONS[protection].attack
    assert attack("--only", only, "--off", protection) == (1, "held 0/1")


@pytest.mark.slow
@pytest.mark.parametrize("only", sorted({protection.attack for protection in PROTECTIONS.values()}))
def test_what_finds_a_protection_off_holds_with_it(only: str) -> None:
    assert attack("--only", only) == (0, "held 1/1")


def test_nothing_to_do_is_no_success() -> None:
    assert attack("--only", "no such attack")[0] == 1


def test_attacks_have_names_of_their_own_and_say_what_passes() -> None:
    assert len({each.name for each in ATTACKS}) == len(ATTACKS) > 100
    assert [each.name for each in ATTACKS if "->" not in each.what] == []
    assert {protection.attack for protection in PROTECTIONS.values()} <= {each.name for each in ATTACKS}
    cases = {each.case for each in ATTACKS} - {None}
    assert cases >= {
        1,
        2,
        4,
        5,
        6,
        7,
        9,
        10,
        11,
        12,
        14,
        15,
        16,
        18,
        19,
        20,
        21,
        22,
        23,
        27,
        28,
        29,
        30,
        33,
        34,
    }
    assert all(name in listing() for name in PROTECTIONS)
