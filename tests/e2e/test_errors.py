"""What a user gets wrong is said in words, with exit code 2 and no traceback."""

from __future__ import annotations

import subprocess

import pytest
from temper import SMALL, Home

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.group_sze=8", "did you mean algorithm.group_size?"),
        ("+algo.group_sze=8", "did you mean algorithm.group_size?"),
        ("env.name=clac", "calc"),
        ("experiment=calk", "experiment=calc"),
    ],
)
def test_a_misspelling_names_the_right_word(home: Home, override: str, words: str) -> None:
    done = home.train(*SMALL, override)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_sandbox_the_error_names_both_ways_to_get_one(home: Home) -> None:
    home.backend = "auto"
    command = home.command(*SMALL, "run.name=none")
    env = {**home.env, "PATH": "/nonexistent", "DOCKER_HOST": "unix:///nonexistent/docker.sock"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "apt-get install bubblewrap" in done.stderr
    assert "Docker engine" in done.stderr
    assert home.wait_until_gone(60) == []
