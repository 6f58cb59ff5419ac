from __future__ import annotations

import asyncio
import glob
import json
import math
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rl.watch.jsonl import read_rows
from rl.watch.wandb_log import choose_mode

ROOT = Path(__file__).parents[3]
BLOCK = 32768
ROWS: list[tuple[str, int, dict[str, float]]] = [
    ("train", 3, {"train/loss": 0.5, "train/kl.mismatch": 1e-5}),
    ("rollout", 8, {"rollout/all/reward.mean": 0.25}),
    ("eval", 2, {"eval/calc/greedy/score.mean": 0.75}),
    ("train", 2, {"train/loss": 0.625}),
    ("train", 3, {"train/loss": math.nan}),
    ("sft", 1, {"sft/loss": 2.0}),
]
WRITER = textwrap.dedent("""
    import json, sys
    from pathlib import Path
    from rl.watch.jsonl import JsonlLog, row
    from rl.watch.wandb_log import WandbLog, WandbSettings
    folder, mode, rows = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    settings = WandbSettings(mode=mode, project="p", name="n", run_id="abc123", folder=folder)
    wandb = WandbLog(settings, {"sft": {"steps": 3}}, print)
    with JsonlLog(folder / "metrics.jsonl") as jsonl:
        for family, step, metrics in rows:
            entry = row(family, step, metrics)
            jsonl.write(entry)
            wandb.write(entry)
    wandb.close(0)
    print("mode", wandb.mode)
""")


def write(folder: Path, mode: str, **environment: str) -> str:
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", WRITER, str(folder), mode, json.dumps(ROWS)]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def records(path: str) -> Iterator[bytes]:
    """Reads the LevelDB log format: a 7-byte file header, blocks of 32 KiB, chunks with 7-byte headers."""
    raw = Path(path).read_bytes()
    assert raw[:4] == b":W&B"
    offset, part = 7, b""
    while offset + 7 <= len(raw):
        left = BLOCK - offset % BLOCK
        if left < 7:
            offset += left
            continue
        _, length, kind = struct.unpack("<IHB", raw[offset : offset + 7])
        data = raw[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind == 0:
            return
        part = data if kind in (1, 2) else part + data
        if kind in (1, 4):
            yield part


def history(path: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Returns the history rows without W&B's own keys, and the step metric of each declared name."""
    from wandb.proto import wandb_internal_pb2 as pb

    rows: list[dict[str, Any]] = []
    axes: dict[str, str] = {}
    for data in records(path):
        record = pb.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = {(i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
            rows.append({key: value for key, value in items.items() if not key.startswith("_")})
        if kind == "metric" and record.metric.step_metric:
            axes[record.metric.glob_name or record.metric.name] = record.metric.step_metric
    return rows, axes


def as_number(value: Any) -> float:
    return float(value)


def same(left: dict[str, Any], right: dict[str, float]) -> bool:
    return left.keys() == right.keys() and all(
        as_number(left[key]) == right[key] or (math.isnan(as_number(left[key])) and math.isnan(right[key]))
        for key in right
    )


def test_offline_both_hold_the_same_numbers_each_family_on_its_own_axis_and_late_rows_stay(tmp_path: Path):
    assert "mode offline" in write(tmp_path, "auto")
    (path,) = glob.glob(str(tmp_path / "wandb/offline-run-*/*.wandb"))
    logged, axes = history(path)
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert len(logged) == len(rows) == len(ROWS)
    for line, entry, (family, step, metrics) in zip(logged, rows, ROWS, strict=True):
        assert (entry.family, entry.step) == (family, step)
        assert same(line, {**entry.metrics, f"{family}/step": float(step)})
        assert same(dict(entry.metrics), metrics)
    assert {axes[f"{family}/*"] for family in ("train", "eval")} == {"train/step", "eval/step"}


class Server:
    """A server of the W&B protocol that keeps what it is sent; `broken` answers everything with an error."""

    def __init__(self, *, broken: bool = False) -> None:
        self.history: list[dict[str, Any]] = []
        self.broken = broken
        self.app = web.Application(client_max_size=1 << 30)
        self.app.router.add_post("/graphql", self.graphql)
        self.app.router.add_post("/files/{entity}/{project}/{run}/file_stream", self.stream)
        self.app.router.add_route("*", "/{rest:.*}", self.other)

    async def graphql(self, request: web.Request) -> web.Response:
        if self.broken:
            return web.Response(status=403)
        body = await request.json()
        query, variables = body["query"], body.get("variables") or {}
        project = {"id": "pid", "name": "p", "entity": {"id": "eid", "name": "ent"}}
        bucket = {"id": "bid", "name": variables.get("name") or "r", "displayName": "n", "description": ""}
        bucket |= {"config": "{}", "sweepName": None, "historyLineCount": 0, "project": project}
        viewer = {"id": "u", "entity": "ent", "username": "u", "flags": "{}", "teams": {"edges": []}}
        answers: dict[str, Any] = {
            "UpsertBucket": {"upsertBucket": {"bucket": bucket, "inserted": True}},
            "Viewer": {"viewer": viewer},
            "ServerFeatures": {"serverInfo": {"features": []}},
            "CreateRunFiles": {"createRunFiles": {"runID": "bid", "uploadHeaders": [], "files": []}},
            "RunStoppedStatus": {"project": {"run": {"stopped": False}}},
        }
        found = next((data for name, data in answers.items() if name in query), {})
        return web.json_response({"data": found})

    async def stream(self, request: web.Request) -> web.Response:
        files = (json.loads(await request.read() or b"{}").get("files")) or {}
        for name, chunk in files.items():
            if name.endswith("history.jsonl"):
                self.history += [json.loads(line) for line in chunk["content"]]
        return web.json_response({"exitcode": None, "limits": {}})

    async def other(self, request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({})

    async def run(self, folder: Path) -> str:
        runner = web.AppRunner(self.app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            return await asyncio.to_thread(
                write, folder, "auto", WANDB_BASE_URL=f"http://127.0.0.1:{port}", WANDB_API_KEY="k" * 40
            )
        finally:
            await runner.cleanup()


async def test_online_the_server_gets_every_row(tmp_path: Path):
    server = Server()
    assert "mode online" in await server.run(tmp_path)
    sent = [{key: value for key, value in line.items() if not key.startswith("_")} for line in server.history]
    assert len(sent) == len(ROWS)
    for line, (family, step, metrics) in zip(sent, ROWS, strict=True):
        assert same(line, {**metrics, f"{family}/step": float(step)})


async def test_a_server_that_refuses_costs_nothing_but_a_note(tmp_path: Path):
    text = await Server(broken=True).run(tmp_path)
    assert "W&B: starting online failed" in text
    assert "mode offline" in text
    assert len(read_rows(tmp_path / "metrics.jsonl")) == len(ROWS)


@pytest.mark.slow
def test_no_server_at_all_costs_nothing_but_a_note(tmp_path: Path):
    text = write(tmp_path, "auto", WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="k" * 40)
    assert "mode offline" in text
    assert len(read_rows(tmp_path / "metrics.jsonl")) == len(ROWS)


def test_disabled_writes_jsonl_only(tmp_path: Path):
    assert "mode disabled" in write(tmp_path, "disabled")
    assert not (tmp_path / "wandb").exists()
    assert len(read_rows(tmp_path / "metrics.jsonl")) == len(ROWS)


def test_auto_follows_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert choose_mode("auto") == "offline"
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password k\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert choose_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert choose_mode("auto") == "disabled"
    assert choose_mode("offline") == "offline"
