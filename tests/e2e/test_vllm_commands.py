"""`temper eval` and `temper serve` with vLLM: what they say is what our own engine says of the same model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path

import aiohttp
import openai
import psutil
import pytest
import torch
from temper import ROOT, Home

from model.chat import nano_chat
from model.hf.folder import save_hf
from model.hf.policy import HFPolicy
from model.hf.tiny import tiny_model
from rl.evals.rows import read_rows
from rl.launch.cli import main
from rl.serve.endpoint import Endpoint, on_loopback
from rl.serve.engines import open_engine
from rl.serve.options import ServeOptions, find_source
from rl.serve.session import Session
from rl.serve.taps import Taps
from rl.serve.voices import EngineVoice

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning"),
]
QUESTIONS = ("47*86=", "1+1=", "9*9=")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Qwen3 whose choices are clear: of fresh weights as they are, all tokens are about as likely."""
    model = tiny_model("hf_tiny", 0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    save_hf(HFPolicy(model), tmp_path / "tiny", nano_chat())
    return tmp_path / "tiny"


def evaluate(folder: Path, engine: str, capsys: pytest.CaptureFixture[str]) -> Path:
    out = folder.parent / engine
    words = ("env=sort", "effort=50", "scaffold=chat", "n=8", "temperature=0", "max_completion_tokens=24")
    code = main(["eval", str(folder), *words, f"engine={engine}", f"out={out}", "--console", "plain"])
    said = capsys.readouterr()
    assert code == 0, said.out + said.err
    return out


def test_an_evaluation_draws_the_same_on_both_engines(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outs = [evaluate(folder, engine, capsys) for engine in ("native", "vllm")]
    found = [
        [
            (row.task_id, row.score, row.stop, row.input_tokens, row.output_tokens)
            for row in rows.rows.values()
        ]
        for rows in (read_rows(out / "rows.jsonl") for out in outs)
    ]
    assert sorted(found[0]) == sorted(found[1]) and len(found[0]) == 8
    cells = [json.loads((out / "result.json").read_text())["cells"][0] for out in outs]
    assert all(cell["n_valid"] == 8 and cell["usage"]["device_s"] > 0 for cell in cells)
    assert cells[0]["identity"]["digest"] == cells[1]["identity"]["digest"]
    assert cells[0]["identity"]["sampling"] != cells[1]["identity"]["sampling"]


async def answers(url: str) -> list[tuple[str | None, list[int], list[float]]]:
    """What the model greedily says, with ids and log-probabilities."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

        async def ask(question: str) -> tuple[str | None, list[int], list[float]]:
            answer = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": question}], temperature=0, max_tokens=24,
                logprobs=True,
            )  # fmt: skip
            (choice,) = answer.choices
            assert choice.logprobs is not None and choice.logprobs.content is not None
            tokens = choice.logprobs.content
            return choice.message.content, [t.token_id for t in tokens], [t.logprob for t in tokens]  # type: ignore[attr-defined]

        return await asyncio.gather(*map(ask, QUESTIONS))


async def answers_of_our_own(folder: Path) -> list[tuple[str | None, list[int], list[float]]]:
    options, taps = ServeOptions(target=str(folder), threads=1), Taps()
    async with open_engine(options, find_source(options), taps) as served:
        session = Session(EngineVoice(served.engine, taps, "t", served.context, images=False), served.chat)
        async with on_loopback(Endpoint("tiny", served.chat, served.engine.stats, anyone=session)) as url:
            return await answers(url)


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as http, http.get(url) as response:
        return response.status, await response.text()


async def test_the_server_answers_as_our_own_engine_does_and_ends_with_vllms_core(
    folder: Path, home: Home
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rl.launch.cli", "serve", str(folder), "--port", "0", "--threads", "1"),
        *("engine=vllm", "engine.vllm.dtype=float32"),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **home.env},
        cwd=ROOT,
    )
    said = ""
    try:
        assert process.stderr is not None
        while not (found := re.search(r"serving tiny at (\S+)/v1", said)):
            line = (await process.stderr.readline()).decode()
            assert line, f"it ended: {said}"
            said += line
        ours, theirs = await answers_of_our_own(folder), await answers(f"{found[1]}/v1")
        for (text, ids, logprobs), other in zip(theirs, ours, strict=True):
            assert (text, ids) == other[:2]
            assert logprobs == pytest.approx(other[2], abs=1e-3)
        assert await get(f"{found[1]}/health") == (200, '{"ok": true}')
        metrics = (await get(f"{found[1]}/metrics"))[1]
        assert 'temper_serve_engine{name="healthy"} 1' in metrics
        made = re.search(r'temper_serve_engine\{name="generated_tokens"\} (\d+)', metrics)
        assert made and int(made[1]) == sum(len(ids) for _, ids, _ in theirs)
        cores = [
            p for p in psutil.Process(process.pid).children() if "EngineCore" in f"{p.name()} {p.cmdline()}"
        ]
        cores[0].send_signal(signal.SIGKILL)
        said += (await process.stderr.read()).decode()
        assert await process.wait() == 1, said
        assert "the engine died" in said
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
