"""How soon a sandbox stands on a root of layers, against the engine's own way of getting there.

    python -m benchmarks.sandbox_layers [--starts 40]

The same files, a small Python root, become a base layer, and an image by `docker import`; a small workspace
lies over the layer. Then a light sandbox of both layers, up to its agent's first answer, and a container of
the image, created and started, take turns, so that both see the same load. Then sandboxes alone, at real-time
priority where that is permitted: what they take on a quiet machine, however busy this one is. Mounts are
timed in this process: with the digest verified, as the first sandbox of a layer has it, and without. The last
line holds the figures; the exit status is 1 when the sandbox takes as long as the container at the median.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docker

from benchmarks.sandbox_exec import realtime
from sandbox.client import Fleet
from sandbox.layers import build
from sandbox.layers.built_in import NAME, ensure_base
from sandbox.layers.compose import LAYERS, Composer
from sandbox.layers.records import Config, Kind
from sandbox.layers.store import LayerStore
from sandbox.types import SandboxSpec

IMAGE = "tempering-bench-layers"
WORKSPACE = "bench:1"
FILES = 300
Found = tuple[Any, float]


def timed(work: Callable[[], Any]) -> Found:
    """Returns what `work` returns, and how many milliseconds it took."""
    start = time.perf_counter()
    found = work()
    return found, 1e3 * (time.perf_counter() - start)


def publish(store: LayerStore, folder: Path, kind: Kind, name: str) -> None:
    """Makes a layer of a folder."""
    with build.from_folder(store, folder, kind) as draft:
        store.publish(draft.tree, kind, Config(), name=name)


def prepare(store: LayerStore, client: Any, scratch: Path) -> dict[str, float]:
    """Makes the layers and the image of the same files; returns milliseconds by step."""
    took: dict[str, float] = {}
    ensure_base(store)
    with store.opened(store.get(NAME)) as tree:
        archive = scratch / "root.tar"
        subprocess.run(["tar", "--numeric-owner", "-C", tree, "-cf", archive, "."], check=True)
        importing = client.api.import_image_from_file
        _, took["docker import"] = timed(lambda: importing(str(archive), repository=IMAGE, tag="1"))
        root = scratch / "root"
        subprocess.run(["cp", "-a", tree, root], check=True)
    (root / "etc/bench").write_text(scratch.name)  # another layer than the built-in one
    _, took["base layer"] = timed(lambda: publish(store, root, Kind.BASE, "bench-base:1"))
    for number in range(FILES):
        path = scratch / "project" / f"package{number % 10}" / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"VALUE = {number}\n" * 50)
    publish(store, scratch / "project", Kind.WORKSPACE, WORKSPACE)
    return took


def mounts(state: Path, count: int) -> tuple[list[float], list[float]]:
    """Returns milliseconds of composing both layers, with their digests verified and without."""
    spec = SandboxSpec(image=NAME, workspace=WORKSPACE)
    first: list[float] = []
    again: list[float] = []
    for _ in range(count):
        composer = Composer(state)
        for times in (first, again):
            composed, took = timed(lambda composer=composer: composer.acquire(spec))
            composer.release(composed.layers)
            times.append(took)
        composer.leave()
    return first, again


def start_container(client: Any) -> float:
    """Returns how long a container of the image takes to be created and started."""

    def start() -> Any:
        container = client.containers.create(f"{IMAGE}:1", ["/usr/bin/sleep", "3600"], network_mode="none")
        container.start()
        return container

    container, took = timed(start)
    container.remove(force=True)
    return took


async def starts(fleet: Fleet, client: Any | None, count: int) -> dict[str, list[float]]:
    """Times sandboxes, and with a client of the engine containers, in turns; returns milliseconds by name."""
    times: dict[str, list[float]] = {"layers": [], "plain": []}
    specs = {
        "layers": SandboxSpec(image=NAME, workspace=WORKSPACE, journal=False),
        "plain": SandboxSpec(journal=False),
    }
    for spec in specs.values():
        await (await fleet.create(spec)).close()
    for _ in range(count):
        for name, spec in specs.items():
            start = time.perf_counter()
            box = await fleet.create(spec)
            times[name].append(1e3 * (time.perf_counter() - start))
            await box.close()
        if client is not None:
            times.setdefault("container", []).append(await asyncio.to_thread(start_container, client))
    return times


def link(state: Path) -> Path:
    """Returns another state folder with the same layers, for a node of its own."""
    other = state.with_name("other")
    other.mkdir()
    (other / LAYERS).symlink_to(state / LAYERS)
    return other


async def measure(count: int) -> bool:
    """Runs all parts and prints; returns whether the figures hold."""
    client: Any = docker.from_env()
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        store = LayerStore(state / LAYERS)
        try:
            (Path(folder) / "scratch").mkdir()
            took = prepare(store, client, Path(folder) / "scratch")
            form = "EROFS" if store.get(NAME).image else "folders"
            first, again = mounts(state, count)
            async with await Fleet.connect(state_dir=state, owner="bench", backend="bubblewrap") as fleet:
                times = await starts(fleet, client, count)
            load, quiet = os.getloadavg()[0], realtime()
            async with await Fleet.connect(state_dir=link(state), owner="b", backend="bubblewrap") as fleet:
                alone = {name: statistics.median(v) for name, v in (await starts(fleet, None, count)).items()}
        finally:
            for image in client.images.list(name=IMAGE):
                client.images.remove(image.id, force=True)
            client.close()
    p50 = {name: statistics.median(values) for name, values in times.items()}
    p95 = {name: statistics.quantiles(values, n=20)[-1] for name, values in times.items()}
    for name in times:
        print(f"{name}: start p50 {p50[name]:.1f} ms, p95 {p95[name]:.1f} ms")
    print(f"load {load:.1f}; then {'real-time' if quiet else 'ordinary'} priority")
    print(
        f"{form}: layer built {took['base layer']:.0f} ms, docker import {took['docker import']:.0f} ms; "
        f"verified and mounted {statistics.median(first):.1f} ms, mounted {statistics.median(again):.2f} ms; "
        f"start alone p50 {alone['layers']:.1f} ms (without layers {alone['plain']:.1f}); "
        f"beside a container p50 {p50['layers']:.1f} ms, the container's "
        f"{p50['container']:.1f} ms: {p50['container'] / p50['layers']:.1f}x"
    )
    return p50["layers"] < p50["container"]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=40)
    arguments = parser.parse_args()
    raise SystemExit(0 if asyncio.run(measure(arguments.starts)) else 1)


if __name__ == "__main__":
    main()
