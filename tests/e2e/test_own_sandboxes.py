"""A run whose samples have sandboxes of their own is killed, and goes on in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from temper import SMALL, Home, steps, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NOTEBOOK = '''
from envs.calc import calc, demonstrations
from envs.registry import env
from sandbox.errors import InfrastructureError


@env("notebook", splits=("train", "eval"), max_turns=3, reward="exact")
def notebook(split, seed):
    yield from calc().tasks(split, seed)


@notebook.setup
async def begin(task, sandbox):
    (await sandbox.exec("echo setup >> notes")).check()


@notebook.tool(stateless=False)
async def python(expression: str, sandbox, number: int) -> str:
    """Evaluates an expression; fails when something ran twice in this sandbox, or not at all."""
    lines = (await sandbox.exec("echo call >> notes; sleep 0.2; wc -l < notes")).check().stdout
    if int(lines) != number + 2:
        raise InfrastructureError(f"{int(lines)} lines at call {number}")
    return "".join(character for character in expression if character.isdigit())[:6] or "none"


notebook.demonstrations(demonstrations)
'''


def test_samples_go_on_in_their_own_sandboxes_after_a_kill(home: Home, tmp_path: Path) -> None:
    file = tmp_path / "notebook.py"
    file.write_text(NOTEBOOK)
    words = [*SMALL, "run.name=own", f"env.name={file}", "sft.steps=80", "rollout.max_in_flight=16"]
    words += ["rollout.groups_per_step=2", "trainer.steps=4", "eval.tasks=4"]
    run = home.run_folder("own")
    driver = home.start(*words)
    assert wait_for(lambda: len(steps(run)) >= 2 or driver.poll() is not None, 600), home.output()[-2000:]
    driver.kill()
    driver.wait()
    done = home.train(*words, "resume=true", timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert f"of {run})" not in done.stdout  # none of its own sandboxes was taken for a leftover
    failed = run / "rollouts" / "failed.jsonl"
    assert not failed.exists(), failed.read_text()[-2000:]
    rows = [
        json.loads(line)["trajectory"]["key"][3:5]
        for path in sorted((run / "rollouts").glob("step-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    assert len(rows) == len({tuple(row) for row in rows}) == 4 * 2 * 4
    assert home.wait_until_gone(60) == []
