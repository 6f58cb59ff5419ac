"""`temper doctor`: what this machine offers to a run, and how to get what is missing."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rl.launch.roots import check_roots
from rl.watch.wandb_log import choose_mode
from sandbox.backends.function import Function
from sandbox.backends.gvisor import Gvisor
from sandbox.layers import erofs
from sandbox.layers.compose import lacking

_MIN_DISK_GB = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing: whether it is fine, what was found, and (when not) what to do. Not all are needed."""

    name: str
    ok: bool
    found: str
    fix: str = ""
    needed: bool = True

    def __str__(self) -> str:
        mark = "ok     " if self.ok else ("MISSING" if self.needed else "absent ")
        return f"{mark} {self.name:<12} {self.found}" + (
            f"\n{'':21}{self.fix}" if self.fix and not self.ok else ""
        )


def examine() -> list[Finding]:
    """Looks at everything; takes a few seconds."""
    boxes = [_docker(), _bubblewrap()]
    some = any(box.ok for box in boxes)
    sandbox = Finding(
        "sandbox",
        some,
        "at least one of the two" if some else "neither Docker nor bubblewrap",
        "get one of the two above",
    )
    rest: list[Callable[[], Finding]] = [
        _python,
        _packages,
        _torch,
        _ray,
        _gpu,
        _kernels,
        _exact,
        _disk,
        _wandb,
    ]
    return [*(look() for look in rest), *boxes, sandbox, *_more_backends()]


def report(findings: list[Finding]) -> Iterator[str]:
    """Yields the findings as lines, and a verdict."""
    yield from map(str, findings)
    bad = [finding.name for finding in findings if finding.needed and not finding.ok]
    yield f"{', '.join(bad)}: not ready to train" if bad else "ready: temper train experiment=calc"


def _more_backends() -> Iterator[Finding]:
    """Those that `auto` never takes; each is tried for real."""
    for backend, what in (
        (Gvisor(), "works: a kernel of its own for each sandbox"),
        (Function(), "works: stateless calls"),
    ):
        problem = asyncio.run(backend.missing())
        yield Finding(backend.name, not problem, problem or what, needed=False)
    yield _layers()


def _layers() -> Finding:
    problem = lacking()
    form = (
        "as EROFS images" if erofs.available() else "as folders; EROFS images need erofs-utils and the kernel"
    )
    tools = [name for name in ("git", "mkfs.ext4") if shutil.which(name) is None]
    found = form + (f"; without {', '.join(tools)}" if tools else "")
    fix = "as root: apt-get install -y erofs-utils e2fsprogs git"
    return Finding("layers", not problem, problem or found, fix, needed=False)


def _python() -> Finding:
    ok = (3, 11) <= sys.version_info[:2] < (3, 14)
    return Finding(
        "python", ok, f"{platform.python_version()} ({sys.executable})", "install Python 3.11, 3.12 or 3.13"
    )


def _packages() -> Finding:
    try:
        return Finding("tempering", True, f"in {check_roots()}")
    except ImportError as error:
        return Finding("tempering", False, "packages from several places", str(error))


def _torch() -> Finding:
    import torch

    cores = len(os.sched_getaffinity(0))
    return Finding("torch", True, f"{torch.__version__}, {torch.get_num_threads()} threads on {cores} cores")


def _ray() -> Finding:
    address = os.environ.get("RAY_ADDRESS", "")
    found = importlib.metadata.version("ray")
    fix = "unset RAY_ADDRESS: a run joins a cluster only by launcher.address"
    return Finding(
        "ray", not address, found + (f", RAY_ADDRESS={address}" if address else ""), fix, needed=False
    )


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("gpu", False, "none; small models train on the CPU", needed=False)
    name = torch.cuda.get_device_name(0)
    if importlib.util.find_spec("triton") is None:
        fix = (
            "pip install 'tempering[gpu]'; float32 policies run without, on the definitions of the operations"
        )
        return Finding(
            "gpu", False, f"{name}, without Triton: bfloat16 policies do not run", fix, needed=False
        )
    return Finding("gpu", True, name, needed=False)


def _kernels() -> Finding:
    """The path of each operation of a policy here, found by running a tiny one."""
    import torch

    from model.diagnostics.paths import probe

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        taken = probe(device)
    except Exception as error:
        found = f"a tiny policy does not run on {device}: {type(error).__name__}: {error}"
        return Finding("kernels", False, found, "train on the CPU meanwhile, or report it", needed=False)
    policy = taken.pop("policy", "reference")
    slow = sorted(name for name, path in taken.items() if path != "triton")
    fast = sorted(name for name in taken if name not in slow)
    if device == "cpu":
        return Finding("kernels", True, f"none without a GPU: policies run by definition ({policy})")
    lines = textwrap.wrap(f"{len(fast)} operations by kernel: {', '.join(fast)}", 90)
    lines += textwrap.wrap(f"by definition: {', '.join(f'{n} ({taken[n]})' for n in slow) or 'none'}", 90)
    return Finding("kernels", not slow and policy == "kernels", f"\n{'':21}".join(lines), needed=False)


def _exact() -> Finding:
    import torch

    from rl.launch.config_exact import of_device

    found = str(of_device("cpu"))
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
        found = f"{of_device('cuda')}, where a run reserves it for a bfloat16 policy; elsewhere {found}"
    return Finding("model.exact", True, f"auto: {found}", needed=False)


def _disk() -> Finding:
    free = shutil.disk_usage(".").free / 1e9
    return Finding(
        "disk", free > _MIN_DISK_GB, f"{free:.1f} GB free here", f"a run may need {_MIN_DISK_GB} GB"
    )


def _wandb() -> Finding:
    mode = choose_mode("auto")
    meaning = {
        "online": "a key was found",
        "offline": "no key; `wandb sync` uploads later",
        "disabled": "WANDB_MODE",
    }
    return Finding("wandb", True, f"{mode} ({meaning[mode]})", needed=False)


def _docker() -> Finding:
    import docker
    from docker.errors import DockerException

    fix = "install and start a Docker engine, or use bubblewrap"
    try:
        _knock(os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock")
        client = docker.from_env(timeout=5)
        try:
            version = str(client.version()["Version"])
        finally:
            client.close()
    except (DockerException, OSError) as error:
        return Finding("docker", False, f"no engine answers ({type(error).__name__})", fix, needed=False)
    return Finding("docker", True, f"engine {version}", needed=False)


def _knock(host: str) -> None:
    """Connects to a local engine's socket once: the client library leaks one for each refused connection."""
    if host.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(5)
            link.connect(host.removeprefix("unix://"))


def _bubblewrap() -> Finding:
    fix = "as root: apt-get install -y bubblewrap"
    if shutil.which("bwrap") is None:
        return Finding("bubblewrap", False, "bwrap is not installed", fix, needed=False)
    command = ["bwrap", "--ro-bind", "/", "/", "--unshare-all", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        fix = "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1), or use Docker"
        return Finding("bubblewrap", False, done.stderr.strip()[:80] or "it failed", fix, needed=False)
    return Finding("bubblewrap", True, "works", needed=False)
