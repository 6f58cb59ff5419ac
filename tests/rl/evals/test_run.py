"""Whole evaluations of a policy of fresh weights, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from envs.registry import env
from envs.types import Task
from rl.engines.vllm_model import ModelFolderError
from rl.evals.plan import PlanError
from rl.evals.rows import Cell, DiskError, RowLog, read_rows
from rl.evals.run import Evaluation, begin, go_on
from rl.evals.sampling import EngineLostError, open_sampler
from rl.evals.settings import EvalSettings, read_settings
from rl.evals.target import TargetError, find_target
from rl.launch.compose import load_config
from rl.launch.words import SettingsError

pytestmark = pytest.mark.timeout(120)


class Quiet:
    """Looks at the progress, and interrupts as Ctrl-C does at a given count."""

    def __init__(self, interrupt_at: int | None = None) -> None:
        self.seen: list[tuple[str, int, int]] = []
        self._at = interrupt_at

    def phase(self, name: str, done: int, total: int) -> None:
        self.seen.append((name, done, total))
        if self._at is not None and done >= self._at:
            raise KeyboardInterrupt

    def figures(self, metrics: object) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


@contextlib.contextmanager
def no_guard() -> Iterator[None]:
    yield


@env("evals/hopeless", splits=("eval",))
def hopeless(split: str, seed: int, fails: bool = True) -> Iterator[Task]:
    yield Task.ask("hopeless/0", "sort:ab=", gold="x", fails=fails)


@hopeless.reward
async def broken(task: Task, trajectory: object) -> float:
    if task.private["fails"]:
        raise RuntimeError("the judge is away")
    return 1.0


def settings(*words: str) -> EvalSettings:
    given = ("env=sort", "n=3", "max_completion_tokens=6", "scaffold=chat", *words)
    merged = {word.partition("=")[0]: word for word in given}
    return read_settings(list(merged.values()), load_config([]))


def start(policy: Path, out: Path, *words: str) -> Evaluation:
    return begin(settings(f"out={out}", *words), find_target(str(policy), out))


def test_efforts_and_scaffolds_are_evaluated_on_the_same_tasks_with_the_same_seeds(
    pico_folder: Path, tmp_path: Path
) -> None:
    words = ("n=2", "k=2", "effort=[1,100]", "scaffold=[chat,tools]", "deadlines_s=[100]")
    screen = Quiet()
    report = start(pico_folder, tmp_path / "out", *words).run(screen, no_guard)
    assert report.complete
    assert [(r.cell.scaffold, r.cell.effort) for r in report.results] == [
        ("chat", 1),
        ("chat", 100),
        ("tools", 1),
        ("tools", 100),
    ]
    assert all((r.n, r.n_valid) == (4, 4) for r in report.results)
    assert screen.seen[-1][1:] == (16, 16)
    data = json.loads((tmp_path / "out" / "result.json").read_text())
    assert data["complete"] is True
    assert {cell["identity"]["n"] for cell in data["cells"]} == {2}
    assert len({cell["identity"]["environment"] for cell in data["cells"]}) == 1
    assert all(cell["usage"]["device_s"] > 0 for cell in data["cells"])
    rows = read_rows(tmp_path / "out" / "rows.jsonl")
    tasks = [[r.task_id for r in rows.of(Cell("sort", b, s))] for b in (1, 100) for s in ("chat", "tools")]
    assert tasks[0] == tasks[1] == tasks[2] == tasks[3]
    assert (tmp_path / "out" / "quality.png").read_bytes().startswith(b"\x89PNG")
    assert "avg" in (tmp_path / "out" / "table.txt").read_text()


def test_what_finished_before_an_interruption_is_kept_and_the_rest_is_drawn_as_it_would_have_been(
    pico_folder: Path, tmp_path: Path
) -> None:
    words = ("n=2", "k=2", "effort=[1,50]", "max_in_flight=2")
    whole = start(pico_folder, tmp_path / "whole", *words).run(Quiet(), no_guard)
    with pytest.raises(KeyboardInterrupt):
        start(pico_folder, tmp_path / "part", *words).run(Quiet(interrupt_at=2), no_guard)
    kept = (tmp_path / "part" / "rows.jsonl").read_text()
    data = json.loads((tmp_path / "part" / "result.json").read_text())
    assert data["complete"] is False
    assert 2 <= sum(cell["n_done"] for cell in data["cells"]) < 8
    report = go_on(tmp_path / "part", []).run(Quiet(), no_guard)
    assert (tmp_path / "part" / "rows.jsonl").read_text().startswith(kept)
    assert report.complete
    assert [r.scores for r in report.results] == [r.scores for r in whole.results]
    tokens = [
        [r.output_tokens for r in read_rows(tmp_path / n / "rows.jsonl").rows.values()]
        for n in ("part", "whole")
    ]
    assert sorted(tokens[0]) == sorted(tokens[1])


def test_the_weights_stay_when_the_run_removes_its_checkpoint(pico_folder: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "step-3" / "policy"
    shutil.copytree(pico_folder, copy)
    evaluation = start(copy, tmp_path / "out")
    shutil.rmtree(copy.parent)
    report = evaluation.run(Quiet(), no_guard)
    assert report.results[0].n_valid == 3
    assert report.results[0].identity.step == 3
    assert not (tmp_path / "out" / "policy").exists(), (
        "the pinned weights go when they are not needed any more"
    )


def test_a_judge_that_fails_gives_no_score_and_its_samples_are_drawn_again_later(
    pico_folder: Path, tmp_path: Path
) -> None:
    words = ("env=evals/hopeless", "n=1", "retries=1")
    report = start(pico_folder, tmp_path / "out", *words).run(Quiet(), no_guard)
    (found,) = report.results
    assert (found.n_done, found.n_valid, found.missing) == (1, 0, {"reward": 1})
    assert found.avg.n == 0
    rows = read_rows(tmp_path / "out" / "rows.jsonl")
    assert {row.attempt for row in rows.rows.values()} == {1}
    again = go_on(tmp_path / "out", ["retries=0"]).run(Quiet(), no_guard)
    assert again.results[0].n_done == 1
    assert {row.attempt for row in read_rows(tmp_path / "out" / "rows.jsonl").rows.values()} == {2}


def test_a_finished_evaluation_is_reported_anew_with_prices(
    pico_folder: Path, tmp_path: Path, files_no_longer_than
) -> None:
    start(pico_folder, tmp_path / "out").run(Quiet(), no_guard)
    (tmp_path / "prices.yaml").write_text("output_tokens: 1000000\n")
    screen = Quiet()
    report = go_on(tmp_path / "out", [f"prices={tmp_path / 'prices.yaml'}"]).run(screen, no_guard)
    assert screen.seen == []
    assert report.results[0].cost == report.results[0].usage.output_tokens
    with files_no_longer_than(64), pytest.raises(DiskError, match="every sample that is done is kept"):
        go_on(tmp_path / "out", []).run(screen, no_guard)
    assert not list((tmp_path / "out").glob("*.partial")) + list((tmp_path / "out").glob(".*.partial"))
    (tmp_path / "out" / "rows.jsonl").write_text("")
    with pytest.raises(PlanError, match="its weights are not kept any more"):
        go_on(tmp_path / "out", []).run(screen, no_guard)


def test_what_samples_depend_on_cannot_change_when_an_evaluation_goes_on(
    pico_folder: Path, tmp_path: Path
) -> None:
    start(pico_folder, tmp_path / "out")
    with pytest.raises(SettingsError, match="n: the samples were drawn with 3; begin another evaluation"):
        go_on(tmp_path / "out", ["n=5"])
    weights = tmp_path / "out" / "policy" / "config.json"
    text = weights.read_text()
    weights.unlink()
    weights.write_text(text + " ")
    with pytest.raises(PlanError, match=r"this has changed: .*weights"):
        go_on(tmp_path / "out", [])


def test_a_folder_is_never_written_over(pico_folder: Path, tmp_path: Path) -> None:
    start(pico_folder, tmp_path / "out")
    with pytest.raises(PlanError, match=r"exists; .*temper eval .*out` goes on with it"):
        start(pico_folder, tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="cannot be written"):
        start(pico_folder, tmp_path / "file" / "out")


def test_an_evaluation_that_could_not_begin_leaves_nothing_in_the_way(
    pico_folder: Path, tmp_path: Path, files_no_longer_than
) -> None:
    with files_no_longer_than(64), pytest.raises(PlanError, match="cannot be written"):
        start(pico_folder, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    left_by_a_kill = tmp_path / ".out.partial" / "policy"
    left_by_a_kill.mkdir(parents=True)
    assert start(pico_folder, tmp_path / "out").folder.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "out" / "plan.json").write_bytes(b"\xff\0")
    with pytest.raises(PlanError, match="begin the evaluation anew"):
        go_on(tmp_path / "out", [])


def test_what_is_no_policy_is_said_to_be_none(pico_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(TargetError, match=r"neither a run's folder nor one with config\.json"):
        find_target(str(tmp_path / "empty"), tmp_path)
    with pytest.raises(ValueError, match="there is no run 'nothing'"):
        find_target("nothing", tmp_path)
    with pytest.raises(TargetError, match="after @ stands the step"):
        find_target("run@last", tmp_path)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("efort=[1,50]", "did you mean effort?"),
        ("n", "has the form key=value"),
        ("n=0", "greater than or equal to 1"),
        ("effort=[0]", "each effort is from 1 to 100"),
        ("effort=[5,5]", "names one twice"),
        ("effort=[1", "cannot be read"),
        ("temperature=.nan", "temperature"),
        ("pass_at=[2]", r"pass@k is known for 1 to 1"),
        ("deadlines_s=[1000]", "goes beyond deadline_s=600"),
        ("max_completion_tokens=64", "leaves no room for a prompt"),
        ("options={calc: {}}", "which env="),
        ("scaffold=[]", "scaffold"),
        ("engine=vllm", "engine=vllm does not do fake_quant=true: .* needs engine=native"),
        ("engine.vllm.dtype=float32", "engine.vllm.dtype has no effect with engine=native"),
        ("engine.vllm.tensorparallel=2", r"did you mean engine\.vllm\.tensor_parallel\?"),
        ("engine.vllm.tensor_parallel=two", r"engine\.vllm\.tensor_parallel: .*integer"),
        ("engine.vllm.kv_cache_gb=0", r"\nengine\.vllm\.kv_cache_gb=0 is at least 1"),
        ("engine.vllm.arguments={model: x}", "follows from other settings"),
        ("vllm={}", "there is no such setting"),
    ],
)
def test_settings_that_make_no_sense_are_refused_with_the_change_to_make(word: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        settings(word)


def test_all_problems_of_the_settings_are_told_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        settings("efort=1", "k=0", "top_p=2")
    assert len(str(caught.value).splitlines()) == 3


def test_an_unknown_split_and_too_few_tasks_are_refused(pico_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no split 'test'; give split= one of train, eval"):
        start(pico_folder, tmp_path / "out", "split=test")
    with pytest.raises(PlanError, match=r"has 1 tasks .* give n=1 or less"):
        start(pico_folder, tmp_path / "out", "env=evals/hopeless", "n=4")
    assert not (tmp_path / "out").exists()


def test_how_vllm_is_started_is_the_runs_with_what_is_given_over_it() -> None:
    run = ["policy=hf", "engine=vllm", "engine.vllm.tensor_parallel=2", "engine.vllm.dtype=bfloat16"]
    found = read_settings(["engine.vllm.dtype=float32"], load_config(run))
    assert (found.engine, found.vllm.tensor_parallel, found.vllm.dtype) == ("vllm", 2, "float32")
    assert read_settings(["engine=native"], load_config(run)).engine == "native"


def test_vllm_is_refused_a_policy_of_our_own_network_before_anything_is_made(
    pico_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelFolderError, match=r"no model of transformers .* take engine=native"):
        start(pico_folder, tmp_path / "out", "engine=vllm", "fake_quant=false")
    assert not (tmp_path / "out").exists()


def test_an_engine_that_dies_ends_the_evaluation_and_its_samples_stay(
    pico_folder: Path, tmp_path: Path
) -> None:
    evaluation = start(pico_folder, tmp_path / "out", "max_in_flight=1")
    closing: list[asyncio.Task[None]] = []

    async def sample(log: RowLog) -> None:
        def end(cell: Cell, done: int, total: int) -> None:
            if done and not closing:
                closing.append(asyncio.create_task(sampler.engine.close()))

        policy = tmp_path / "out" / "policy"
        async with open_sampler(evaluation.plan, policy, log, end, tmp_path / "out") as sampler:
            await sampler.run(evaluation.plan)

    with RowLog(tmp_path / "out" / "rows.jsonl") as log:
        with pytest.raises(EngineLostError, match=f"temper eval {tmp_path / 'out'}` goes on"):
            asyncio.run(sample(log))
        assert 0 < len(log.found.rows) < 3
        assert all(row.score is not None for row in log.found.rows.values())
    assert go_on(tmp_path / "out", []).run(Quiet(), no_guard).complete
