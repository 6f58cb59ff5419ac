"""Agent programs: somebody else's loop as the scaffold, with our model behind its OpenAI client.

A program is told where the model is by `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `OPENAI_MODEL`, and what to do
by its task. Whatever it asks the model becomes the turns of its trajectory; what it returns stands as the
observation after its last turn, where rewards find it (`result_of`).

A program of a process of its own says where it runs: on the host, trusted, or inside the trajectory's
sandbox, from which the model is all that it reaches unless the sandbox's network allows more.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from envs.base import Episode
from envs.types import Role, Task, Trajectory
from sandbox.base import Sandbox
from sandbox.policy import OWNER_HOST, Network, Rule
from sandbox.types import ExecResult, SandboxSpec

OUTPUT_LIMIT = 64 << 10
"""Bytes of a program's output that are kept, from its end."""
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV")
_TAIL = 2000
Where = Literal["host", "sandbox"]
MODEL = Rule(OWNER_HOST, methods=("GET", "POST"))
"""What a phase of a sandbox's network needs for a program inside to reach the model."""
SANDBOX_URL = f"http://{OWNER_HOST}/v1"
FOLDER = "/workspace/agent"
"""Where the folder of a program lies in its sandbox."""
_LONGEST_S = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class Access:
    """Where the model is for one sample: its key works while the sample runs."""

    base_url: str
    api_key: str
    model: str

    def environ(self) -> dict[str, str]:
        """The variables that OpenAI's clients read."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
        }


class AgentError(RuntimeError):
    """A program that failed: its sample has no verdict, and is run again."""


class Agent(Protocol):
    """A program that works on a task with a model."""

    async def run(self, task: Task, access: Access, sandbox: Sandbox | None) -> str:
        """Works on a task and returns the result. Raises `AgentError` when the program itself fails."""
        ...


AgentFunction = Callable[..., Awaitable[object] | object]


@dataclass(frozen=True, slots=True)
class FunctionAgent:
    """An async function of (task, access), and of sandbox if it takes one, in the worker's event loop."""

    function: AgentFunction

    async def run(self, task: Task, access: Access, sandbox: Sandbox | None) -> str:
        """Calls the function."""
        takes_sandbox = "sandbox" in inspect.signature(self.function).parameters
        result = self.function(task, access, sandbox) if takes_sandbox else self.function(task, access)
        if not inspect.isawaitable(result):
            raise TypeError(
                f"the agent {getattr(self.function, '__name__', '')} is no async function, and would hold up "
                "all others: write `async def`"
            )
        value = await result
        return "" if value is None else str(value)


@dataclass(frozen=True, slots=True)
class ProcessAgent:
    """A program of a process of its own. The task comes as JSON on its standard input.

    Attributes:
        command: Program and arguments.
        env: More variables of its environment, which else has few.
        cwd: A folder of this machine in which it runs; its sandbox gets a copy (`FOLDER`). Empty: the folder
            of the run, or of the sandbox.
        where: `host`: on this machine, trusted, as this user. `sandbox`: inside the trajectory's sandbox.
    """

    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    cwd: str = ""
    where: Where = "host"

    def __post_init__(self) -> None:
        if self.where not in get_args(Where):
            raise ValueError(f"an agent runs where={' or '.join(get_args(Where))}, not {self.where!r}")
        if isinstance(self.command, str) or not self.command:
            raise ValueError(
                f'the command of an agent is a list, as in ["python3", "a.py"]: {self.command!r}'
            )

    async def run(self, task: Task, access: Access, sandbox: Sandbox | None) -> str:
        """Runs it to its end; ends it and what it started when the sample ends before."""
        if self.where == "host":
            return await self._on_host(task, access)
        if sandbox is None:
            raise ValueError("this agent runs in a sandbox, and its sample has none: @env(sandbox=...)")
        return await self._inside(task, access, sandbox)

    async def _inside(self, task: Task, access: Access, sandbox: Sandbox) -> str:
        if self.cwd:
            await sandbox.upload(Path(self.cwd), FOLDER)
        done = await sandbox.exec(
            list(self.command),
            stdin=task_json(task).encode(),
            env={"PYTHONSAFEPATH": "1", **access.environ(), **self.env},
            cwd=FOLDER if self.cwd else "/workspace",
            timeout_s=_LONGEST_S,  # the sample's deadline ends it
            output_limit=2 * OUTPUT_LIMIT,  # of which the half is kept of its end
        )
        if done.exit_code is None or done.oom:
            raise AgentError(f"the agent was ended in its sandbox: {_ended(done)}")
        return _result(done.exit_code, done.stdout[-OUTPUT_LIMIT:], done.stderr[-OUTPUT_LIMIT:])

    async def _on_host(self, task: Task, access: Access) -> str:
        known = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env={**known, "PYTHONSAFEPATH": "1", **access.environ(), **self.env},
            cwd=self.cwd or None,
            start_new_session=True,
        )
        assert process.stdin and process.stdout and process.stderr
        try:
            with suppress(ConnectionError):  # it need not read
                process.stdin.write(task_json(task).encode())
                await process.stdin.drain()
            process.stdin.close()
            output, errors = await asyncio.gather(_tail(process.stdout), _tail(process.stderr))
            code = await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        return _result(code, output, errors)


class AgentEpisode(Episode, Protocol):
    """An episode that can open the model to a program."""

    agent: Agent | None
    box: Sandbox | None

    def endpoint(self) -> AbstractAsyncContextManager[Access]:
        """Opens the model to a program, until it is left."""
        ...


def task_json(task: Task) -> str:
    """What a program is told: the task's id and its prompt, as OpenAI's messages."""
    prompt = [{"role": str(message.role), "content": message.content} for message in task.prompt]
    return json.dumps({"id": task.id, "messages": prompt}, ensure_ascii=False)


def result_of(trajectory: Trajectory) -> str:
    """Returns what the program of a trajectory returned; without one, the answer of the last turn."""
    last = trajectory.turns[-1].observations if trajectory.turns else ()
    return last[-1].content if last and last[-1].role == Role.TOOL else trajectory.answer


def inside(agent: object) -> bool:
    """Whether an agent runs in the sandbox of its trajectory."""
    return isinstance(agent, ProcessAgent) and agent.where == "sandbox"


def reaching_model(spec: SandboxSpec | None) -> SandboxSpec:
    """Returns a specification whose sandbox reaches the model; without a network of its own nothing else.

    Raises:
        ValueError: It has phases, of which none has a rule for the model.
    """
    spec = spec or SandboxSpec()
    if not spec.network:
        return replace(spec, network=Network({"solve": (MODEL,)}, "solve"))
    if not any(MODEL in spec.network.rules(phase) for phase in spec.network.phases):
        raise ValueError(
            "an agent in a sandbox needs the model, which no phase of its network allows: give the phase it "
            "runs in the rule envs.agents.MODEL"
        )
    return spec


def _ended(done: ExecResult) -> str:
    why = "it needed more memory than it has" if done.oom else "it had no exit code"
    return f"{why}; {done.stderr[-_TAIL:].decode(errors='replace').strip() or 'no message'}"


def _result(code: int, output: bytes, errors: bytes) -> str:
    said, complaint = (text.decode(errors="replace") for text in (output, errors))
    if code != 0:
        raise AgentError(
            f"the agent ended with exit code {code}: {complaint[-_TAIL:].strip() or 'no message'}"
        )
    return said.strip()


async def _tail(stream: asyncio.StreamReader) -> bytes:
    """Reads to the end and keeps the last bytes."""
    kept = b""
    while data := await stream.read(1 << 16):
        kept = (kept + data)[-OUTPUT_LIMIT:]
    return kept


def as_agent(value: Any) -> Agent:
    """Returns an agent as it was given, or a function as one.

    Raises:
        TypeError: It is neither.
    """
    if callable(getattr(value, "run", None)):
        return value
    if inspect.iscoroutinefunction(value):
        return FunctionAgent(value)
    raise TypeError(f"an agent is an async function of (task, access), or has an async `run`: not {value!r}")
