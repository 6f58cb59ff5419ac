"""Rows and results made by hand, and a tiny policy on disk."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from model.chat import nano_chat
from model.checkpoint import save_policy
from model.config import PolicyConfig
from model.policy import Policy
from rl.evals.plan import Identity
from rl.evals.rows import Cell, Row
from rl.evals.settings import EvalSettings
from rl.evals.summary import CellResult, summarize_cell


def make_row(task: int, sample: int, score: float | None, **changed: object) -> Row:
    fields = {
        "cell": Cell("sort", 50, "chat"),
        "task": task,
        "sample": sample,
        "attempt": 0,
        "task_id": f"sort/{task}",
        "version": 7,
        "score": score,
        "missing": "" if score is not None else "sandbox: it is gone",
        "parts": {},
        "status": "finished",
        "stop": "answer",
        "turns": 1,
        "tool_calls": 0,
        "input_tokens": 10,
        "output_tokens": 5,
        "seconds": 1.0,
        "sandbox_s": 0.5,
    }
    return Row(**{**fields, **changed})  # type: ignore[arg-type]


def make_settings(**changed: object) -> EvalSettings:
    fields = {"env": "sort", "effort": 50, "scaffold": "chat", "max_completion_tokens": 12, "max_tokens": 64}
    return EvalSettings.model_validate({**fields, **changed})


def make_result(
    scores: list[float | None], effort: int = 50, tokens: int = 5, **settings: object
) -> CellResult:
    """The result of a cell with one sample a task."""
    cell = Cell("sort", effort, "chat")
    identity = Identity("run@7", 7, "abc", effort, "chat", len(scores), "tasks", "draws")
    rows = [make_row(task, 0, score, cell=cell, output_tokens=tokens) for task, score in enumerate(scores)]
    return summarize_cell(cell, identity, rows, 4.0, make_settings(**settings), None)


@pytest.fixture(scope="session")
def row() -> Callable[..., Row]:
    return make_row


@pytest.fixture(scope="session")
def settings() -> Callable[..., EvalSettings]:
    return make_settings


@pytest.fixture(scope="session")
def result() -> Callable[..., CellResult]:
    return make_result


@pytest.fixture(scope="session")
def pico_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of fresh weights, as a folder."""
    policy = Policy(PolicyConfig.preset("pico"))
    policy.reset_parameters(0)
    folder = tmp_path_factory.mktemp("policies") / "pico"
    save_policy(policy, folder, chat=nano_chat())
    return folder


@pytest.fixture
def files_no_longer_than() -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """What is written beyond fails as on a full disk."""

    @contextlib.contextmanager
    def limited(size: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited
