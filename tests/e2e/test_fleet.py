"""A run whose tools work in the sandboxes of a fleet, behind a front."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from temper import SMALL, Home, steps

from sandbox.tokens import NODE_TOKEN, TOKEN, fresh_token

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def serve(home: Home, *words: str) -> tuple[subprocess.Popen[str], str]:
    """Starts `temper sandbox ...` and returns the process with the address that it serves at."""
    command = [sys.executable, "-m", "rl.launch.cli", "sandbox", *words, "--port", "0"]
    with (home.path / f"{words[0]}.log").open("w") as log:
        process = subprocess.Popen(command, env=home.env, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert " serves at " in line, (home.path / f"{words[0]}.log").read_text()
    return process, line.split()[-1]


def end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.wait(60)
    assert process.stdout is not None
    process.stdout.close()


def test_a_run_uses_the_sandboxes_behind_a_front(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, fresh_token()[0])
    monkeypatch.setenv(NODE_TOKEN, fresh_token()[0])
    nodes, audit = home.path / "nodes", home.path / "audit"
    node, address = serve(home, "node", "--name", "one", "--state", str(home.path / "one"))
    try:
        nodes.write_text(f"one {address}\n")
        front, url = serve(home, "serve", "--nodes", str(nodes), "--audit", str(audit))
        try:
            done = home.train(
                *SMALL, "run.name=remote", "trainer.steps=2", "sft.steps=80", f"sandbox.url={url}"
            )
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
            assert steps(home.run_folder("remote")) == [1, 2]
            assert '"create"' in audit.read_text()
        finally:
            end(front)
    finally:
        end(node)


def test_a_front_that_does_not_answer_is_named(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, fresh_token()[0])
    done = home.train(*SMALL, "run.name=nowhere", "sandbox.url=http://127.0.0.1:9")
    assert done.returncode != 0
    assert "127.0.0.1:9" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert not list(Path(home.run_folder("nowhere")).glob("rollouts/*"))
