"""`temper serve`: what it serves, to whom, and how it stops."""

import asyncio
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import aiohttp
import openai
import pytest

from model.chat import nano_chat
from model.checkpoint import load_policy, save_policy
from model.config import PolicyConfig
from model.layers.packed import PackedExperts
from model.policy import Policy
from rl.checkpoint import CheckpointStore
from rl.engines.native import EngineClosedError
from rl.launch.compose import load_config
from rl.launch.run import RunState, open_run
from rl.launch.runs import NoSuchRunError
from rl.launch.words import SettingsError
from rl.serve.command import run_server
from rl.serve.endpoint import Endpoint, on_loopback
from rl.serve.engines import open_engine, watch
from rl.serve.options import ServeOptions, Source, engine_settings, find_source
from rl.serve.session import Session
from rl.serve.taps import Taps
from rl.serve.voices import EngineVoice
from sandbox.errors import PolicyError
from sandbox.serving import Bind
from tests.rl.rollout.scripted import CHAT, ScriptedEngine, ids

ROOT = Path(__file__).parents[3]
MESSAGES = [{"role": "user", "content": "47*86="}]


@pytest.fixture
def checkpoint(tmp_path):
    policy = Policy(PolicyConfig.preset("nano"))
    policy.reset_parameters(1)
    save_policy(policy, tmp_path / "mine", chat=nano_chat())
    return tmp_path / "mine"


@pytest.fixture
def run(tmp_path, checkpoint):
    config = load_config(["experiment=calc", f"run.root={tmp_path}", "run.name=trained"])
    folder = open_run(config)
    folder.write_config([], config)
    folder.close(RunState.FINISHED)
    return folder


def test_a_checkpoint_is_found_by_its_folder_and_a_run_by_its_name(tmp_path, checkpoint, run):
    assert find_source(ServeOptions(target=str(checkpoint))).name == "mine"
    with pytest.raises(PolicyError, match="no checkpoint yet"):
        find_source(ServeOptions(target="trained", root=tmp_path))

    def write(folder: Path) -> None:
        folder.mkdir()
        for file in checkpoint.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())

    store = CheckpointStore(run.checkpoints)
    for step in (1, 2):
        store.save(step, {}, write)
    source = find_source(ServeOptions(target="trained", root=tmp_path))
    assert (source.name, source.folder) == ("trained", run.checkpoints / "step-2" / "policy")
    assert source.run is not None and source.run.env.name == "calc" and source.step == 2
    assert find_source(ServeOptions(target="trained", root=tmp_path, step=1)).folder.parent.name == "step-1"
    assert find_source(ServeOptions(target=str(run.checkpoints / "step-1"))).name == "step-1"
    with pytest.raises(NoSuchRunError, match="did you mean 'trained'"):
        find_source(ServeOptions(target="trianed", root=tmp_path))


def test_nobody_else_gets_in_without_a_token():
    with pytest.raises(PolicyError, match="--public"):
        ServeOptions(target="x", bind=Bind("0.0.0.0")).check()
    with pytest.raises(PolicyError, match="--token-file"):
        ServeOptions(target="x", bind=Bind("0.0.0.0", public=True)).check()
    with pytest.raises(PolicyError, match="--packed"):
        ServeOptions(target="x", prefix_store="memory").check()


def test_the_engine_is_the_runs_unless_words_choose_another():
    def chosen(*words, source=None, **options):
        source = source or Source(Path("x"), "x")
        return engine_settings(ServeOptions(target="x", settings=words, **options), source)

    trained = Source(
        Path("x"), "x", load_config(["policy=hf", "engine=vllm", "engine.vllm.tensor_parallel=2"])
    )
    assert chosen().engine == "native"
    assert chosen("engine=vllm", "engine.vllm.kv_cache_gb=3").vllm.kv_cache_gb == 3
    found = chosen("engine.vllm.dtype=float32", source=trained)
    assert (found.engine, found.vllm.tensor_parallel, found.vllm.dtype) == ("vllm", 2, "float32")
    assert chosen("engine=native", source=trained).engine == "native"
    with pytest.raises(PolicyError, match=r"--packed.* belong to engine=native"):
        chosen("engine=vllm", packed=True)
    with pytest.raises(PolicyError, match=r"--packed-experts.* belong to engine=native"):
        chosen("engine=vllm", packed_experts=True)
    with pytest.raises(SettingsError, match="no effect with engine=native"):
        chosen("engine.vllm.dtype=float32")
    with pytest.raises(SettingsError, match=r"did you mean engine\?"):
        chosen("engin=vllm")


async def test_experts_stay_in_fp4_where_the_checkpoint_has_them_so(checkpoint, capsys):
    options = ServeOptions(target=str(checkpoint), packed_experts=True, threads=1)
    with pytest.raises(ValueError, match="stores experts in FP4"):
        async with open_engine(options, find_source(options), Taps()):
            pass
    policy, quantization = load_policy(checkpoint), PolicyConfig.preset("official").quantization
    stored = replace(policy.config, quantization=quantization)
    save_policy(policy, checkpoint, stored=stored)
    read = []
    for packed in (False, True):
        options = replace(options, packed_experts=packed)
        async with open_engine(options, find_source(options), Taps()) as served:
            read.append(re.search(r"read (\S+) million", capsys.readouterr().err)[1])
            kinds = {type(module) for module in served.engine._policy.modules()}
            assert (PackedExperts in kinds) == packed
    assert read[0] == read[1]


def test_a_policy_of_our_own_network_is_not_served_by_vllm(checkpoint):
    with pytest.raises(ValueError, match="take engine=native"):
        run_server(ServeOptions(target=str(checkpoint), settings=("engine=vllm",)))


async def test_an_engine_that_died_is_unhealthy_and_ends_the_server(checkpoint):
    source = find_source(ServeOptions(target=str(checkpoint)))
    taps = Taps()
    async with open_engine(ServeOptions(target=str(checkpoint), context=64), source, taps) as served:
        session = Session(EngineVoice(served.engine, taps, "k", 64, images=False), served.chat)
        endpoint = Endpoint("mine", served.chat, served.engine.stats, anyone=session)
        async with on_loopback(endpoint) as url, aiohttp.ClientSession() as http:

            async def health():
                async with http.get(url.replace("/v1", "/health")) as response:
                    return response.status, await response.json()

            assert await health() == (200, {"ok": True})
            await served.engine.close()
            assert await health() == (503, {"ok": False})
            with pytest.raises(EngineClosedError, match="serve again"):
                await watch(served.engine)


async def test_without_a_key_only_programs_of_this_machine_are_served():
    engine = ScriptedEngine(lambda request: ids("<answer>1<end>"))
    session = Session(EngineVoice(engine, Taps(), "k", 99, images=False), CHAT)
    endpoint = Endpoint("mine", CHAT, engine.stats, anyone=session)
    body = {"model": "mine", "messages": MESSAGES}
    async with on_loopback(endpoint) as url, aiohttp.ClientSession() as http:

        async def post(**options):
            async with http.post(f"{url}/chat/completions", **options) as response:
                return response.status

        assert await post(json=body) == 200
        assert await post(json=body, headers={"Host": "rebound.example"}) == 403
        assert await post(data=b"{}", headers={"Content-Type": "text/plain"}) == 415
        await endpoint.drain(1.0)
        assert await post(json=body) == 503


@pytest.mark.slow
async def test_the_command_serves_openais_client_and_stops_when_answers_are_over(checkpoint, tmp_path):
    token = tmp_path / "token"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rl.launch.cli", "serve", str(checkpoint), "--port", "0", "--threads", "1"),
        *("--token-file", str(token), "--context", "512", "--packed", "--prefix-store", "memory"),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    said = ""
    try:
        assert process.stderr is not None
        async with asyncio.timeout(240):
            while not (found := re.search(r"serving mine at (\S+)", said)):
                line = (await process.stderr.readline()).decode()
                assert line, f"it ended: {said}"
                said += line
        async with openai.AsyncOpenAI(base_url=found[1], api_key=token.read_text(), max_retries=0) as client:
            ask = client.chat.completions.create
            answer = await ask(model="mine", messages=MESSAGES, max_tokens=8, reasoning_effort="low")
            assert answer.usage.completion_tokens <= 8
            async with openai.AsyncOpenAI(base_url=found[1], api_key="wrong", max_retries=0) as stranger:
                with pytest.raises(openai.AuthenticationError):
                    await stranger.models.list()
            stream = await ask(model="mine", messages=MESSAGES, max_tokens=300, seed=2, stream=True)
            await stream.__anext__()
            process.send_signal(signal.SIGTERM)
            pieces = [piece async for piece in stream]
            assert pieces[-1].choices[0].finish_reason in ("length", "stop", "tool_calls")
        async with asyncio.timeout(120):
            said += (await process.stderr.read()).decode()
            assert await process.wait() == 0, said
        assert said.endswith("stopped\n")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
