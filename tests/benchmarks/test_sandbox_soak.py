"""Growth under use: the line through the samples, and a soak of half a minute."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.sandbox_soak_samples import BOUNDS, Sample, draw, growths

STILL = Sample(0.0, **dict.fromkeys(BOUNDS, 10.0))


def samples(name: str, per_s: float) -> list[Sample]:
    return [replace(STILL, at_s=float(t), **{name: 10.0 + per_s * t}) for t in range(0, 1200, 10)]


@pytest.mark.parametrize("name", [*BOUNDS])
def test_what_grows_is_found(name: str) -> None:
    slope = 1.2 * BOUNDS[name] / 590
    found = {growth.name: growth for growth in growths(samples(name, slope))}
    assert [growth.name for growth in found.values() if not growth.holds] == [name]
    assert found[name].per_hour == pytest.approx(3600 * slope)
    assert found[name].rise == pytest.approx(590 * slope)


def test_growth_that_has_ended_by_half_time_does_not_count() -> None:
    early = [replace(STILL, at_s=float(t), node_memory_mib=min(t, 500.0)) for t in range(0, 1200, 10)]
    assert all(growth.holds for growth in growths(early))


def test_too_few_samples_are_an_error() -> None:
    with pytest.raises(ValueError, match="run longer"):
        growths(samples("node_fds", 0.0)[:4])


def test_the_picture_has_all_figures(tmp_path: Path) -> None:
    draw(samples("node_fds", 0.1), tmp_path / "soak.png")
    assert (tmp_path / "soak.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_minute_of_use_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.sandbox_soak", "--no-docker", "--minutes", "1"]
    command += ["--every-s", "1", "--picture", str(tmp_path / "soak.png")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].startswith("soak minutes 1")
