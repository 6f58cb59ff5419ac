"""Attacks with processes and time: storms, what will not die, what stops or outlives everything else."""

from __future__ import annotations

import asyncio
import os
import statistics
import time

import psutil

from benchmarks.sandbox_attack_kit import Scene, Table, check, ended, limited, typed
from sandbox.client import RemoteBox
from sandbox.errors import RefusedError

TABLE = Table("processes")
_LIVE = "ls -d /proc/[0-9]* | wc -l"


async def processes(box: RemoteBox) -> int:
    """Returns how many processes a sandbox has, as seen from inside."""
    return int((await box.exec(_LIVE)).stdout)


async def calm(scene: Scene, most: int = 14) -> None:
    """Fails unless the attacked sandbox answers, with only a few processes left."""
    await scene.answers()
    deadline = time.monotonic() + 5
    while (left := await processes(scene.box)) > most and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    check(left <= most, f"{left} processes are left")


async def spent(box: RemoteBox, calls: int = 8) -> float:
    """Returns the median seconds of a sibling's commands."""
    times: list[float] = []
    for _ in range(calls):
        start = time.perf_counter()
        await box.exec(["true"])
        times.append(time.perf_counter() - start)
    return statistics.median(times)


async def storm(scene: Scene, source: str) -> None:
    """Runs a storm beside a sibling's commands; the sandbox must then answer and be empty again."""
    attack = asyncio.create_task(scene.box.exec(source, timeout_s=1))
    await asyncio.sleep(0.3)
    took = await spent(scene.sibling)
    result = await attack
    check(result.exit_code != 0, "the storm ended by itself")
    check(took < 1.0, f"a sibling's command took {took:.2f} s at the median")
    await calm(scene)


@TABLE.attack("fork bomb of the shell", case=1, needs="process_limit")
async def shell_bomb(scene: Scene) -> None:
    """`b() { b | b & b; }; b` -> siblings answer beside it, all of it dies at the deadline."""
    await storm(scene, "b() { b | b & b; }; b")


@TABLE.attack("fork bomb of sessions", case=1, needs="process_limit")
async def session_bomb(scene: Scene) -> None:
    """Forks that each become a session leader and ignore every signal -> the same."""
    await storm(
        scene,
        """exec /usr/bin/python3 -c '
import os, signal
for number in set(range(1, 65)) - {9, 17, 19, 32, 33}: signal.signal(number, signal.SIG_IGN)
while True:
    try: os.fork(); os.setsid()
    except OSError: pass
'""",
    )


@TABLE.attack("a thousand processes at once", case=1, needs="process_limit")
async def many(scene: Scene) -> None:
    """Starts sleeping processes until it may not -> never more than the limit of the sandbox."""
    source = """
import os, time
n = 0
try:
    while n < 1000:
        if os.fork() == 0: time.sleep(5); os._exit(0)
        n += 1
except OSError: pass
print(n <= 64)
"""
    await scene.says(source, b"True")
    await calm(scene)


@TABLE.attack("deaf to SIGTERM", case=2)
async def deaf(scene: Scene) -> None:
    """Ignores all signals that can be ignored and spins -> dead at its deadline, exit code unknown."""
    start = time.monotonic()
    result = await scene.box.exec("trap '' TERM INT HUP QUIT USR1; while :; do :; done", timeout_s=0.3)
    check(result.timed_out and result.exit_code is None, f"it ended otherwise: {result}")
    check(time.monotonic() - start < 10, "it outlived its deadline")
    await calm(scene)


@TABLE.attack("child keeps stdout", case=4)
async def held_stdout(scene: Scene) -> None:
    """A child in the background holds stdout open -> the result comes when the main process ends."""
    start = time.monotonic()
    result = await scene.box.exec("sleep 60 & echo out; exit 7", timeout_s=30)
    check((result.exit_code, result.stdout) == (7, b"out\n"), f"wrong result {result}")
    check(time.monotonic() - start < 5, "the result waited for the child")


@TABLE.attack("caller goes away", case=5)
async def cancelled(scene: Scene) -> None:
    """Cancels a command that double-forks, sets a session and sleeps -> nothing of it lives on."""
    call = asyncio.create_task(
        scene.box.exec("(setsid sh -c 'sleep 4001 & setsid sleep 4001' &); sleep 4001", timeout_s=60)
    )
    await asyncio.sleep(0.4)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    for _ in range(100):
        if b"4001" not in (await scene.box.exec("cat /proc/[0-9]*/cmdline 2>/dev/null")).stdout:
            return
        await asyncio.sleep(0.05)
    check(False, "it lives on after its caller has gone")


@TABLE.attack("a thousand orphans", case=6)
async def orphans(scene: Scene) -> None:
    """A thousand double forks -> no zombie stays."""
    source = """
import os
for n in range(1000):
    if os.fork() == 0:
        if os.fork() == 0: os._exit(0)
        os._exit(0)
    os.wait()
"""
    check((await scene.python(source, 30)).exit_code == 0, "the forks failed")
    for _ in range(40):
        states = await scene.box.exec("grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null")
        if not states.stdout:
            return
        await asyncio.sleep(0.05)
    check(False, f"zombies are left: {states.stdout[:200]!r}")


_WORK = """
import time
def work(seconds):
    n, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(2000): pass
        n += 1
    return n
print(work(%s))
"""


_SPIN = """
import os, time
end, start = time.monotonic() + 2, os.times()
for n in range(4):
    if os.fork() == 0:
        while time.monotonic() < end: pass
        os._exit(0)
for n in range(4): os.wait()
print((os.times()[2] + os.times()[3] - start[2] - start[3]) / 2)
"""


@TABLE.attack("full processor at half a core", case=7, needs="cpu_limit")
async def burner(scene: Scene) -> None:
    """Spins in many processes.

    -> no more than its share; a sibling loses less than a fifth of its throughput.
    """
    tenth = await scene.fresh(limited(cpus=0.1))
    used = float((await scene.python(_SPIN, 20, tenth)).stdout)
    told = not scene.fleet.capabilities.own_kernel  # which counts the time that passes
    check(used < 0.3 or not told, f"it had {used:.2f} of a core, allowed a tenth")
    box = await scene.fresh(limited(cpus=0.5))
    burn = "for i in 1 2 3 4; do (while :; do :; done) & done; wait"
    losses: list[float] = []
    if os.getloadavg()[0] > 2 * (
        os.cpu_count() or 1
    ):  # then others, not the attack, decide on what a sibling gets
        return
    for _ in range(3):  # what else runs on the machine comes and goes; the best of three rounds tells
        beside, alone = list[int](), list[int]()
        for _ in range(4):
            alone.append(int((await scene.sibling.python(_WORK % 0.2)).stdout))
            attack = asyncio.create_task(box.exec(burn, timeout_s=0.4))
            await asyncio.sleep(0.1)
            beside.append(int((await scene.sibling.python(_WORK % 0.2)).stdout))
            await attack
        losses.append(1 - statistics.median(beside) / statistics.median(alone))
        if losses[-1] < 0.2:
            break
    check(min(losses) < 0.2, f"a sibling lost {[f'{loss:.0%}' for loss in losses]} of its throughput")


@TABLE.attack("real-time and negative priority", needs="!own_kernel")
async def priority(scene: Scene) -> None:
    """Asks for SCHED_FIFO, nice -20, real-time I/O and autogroup priority -> all refused."""
    await scene.says(
        """
import ctypes, os
libc, got = ctypes.CDLL(None, use_errno=True), []
def attempt(name, act):
    try: act(); got.append(name)
    except OSError: pass
attempt('fifo', lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
attempt('rr', lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1)))
attempt('nice', lambda: os.setpriority(os.PRIO_PROCESS, 0, -20))
if libc.syscall(251, 1, 0, 1 << 13) == 0: got.append('io')
def group():
    with open('/proc/self/autogroup', 'w') as file: file.write('-20')
attempt('autogroup', group)
print(got)
""",
        b"[]",
    )


@TABLE.attack("raising its own limits")
async def rlimits(scene: Scene) -> None:
    """Raises each of its resource limits, and those of other processes -> refused."""
    await scene.says(
        """
import os, resource
got = []
for name in ('NOFILE', 'FSIZE', 'CORE', 'MEMLOCK'):
    kind = getattr(resource, 'RLIMIT_' + name)
    soft, hard = resource.getrlimit(kind)
    if hard == resource.RLIM_INFINITY: got.append(name + ' has no limit')
    try: resource.setrlimit(kind, (hard + 1, hard + 1)); got.append(name)
    except (OSError, ValueError): pass
for pid in (1, os.getppid()):
    try: resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3)); got.append(pid)
    except OSError: pass
print(got)
""",
        b"[]",
    )


@TABLE.attack("kill and stop everything", needs="separate_users")
async def kill_all(scene: Scene) -> None:
    """`kill -KILL -1` and `-STOP`, all groups and every pid, from commands and calls -> the agent lives."""
    for number in ("STOP", "KILL"):
        line = f"kill -{number} -1; for p in /proc/[0-9]*; do kill -{number} ${{p#/proc/}}; done"
        await scene.box.exec(line, timeout_s=1)
        await scene.box.python(f"import os, signal; os.kill(-1, signal.SIG{number})", timeout_s=1)
    await calm(scene)


@TABLE.attack("vfork that never returns")
async def vfork(scene: Scene) -> None:
    """A vfork child that sleeps, its parent in an uninterruptible wait -> dead at the deadline."""
    source = """
import ctypes, time
libc = ctypes.CDLL(None)
if libc.syscall(56, 0x4000 | 17, 0, 0, 0, 0) == 0: time.sleep(3600)
"""
    check((await scene.python(source, 0.5)).timed_out, "it ended by itself")
    await calm(scene)


@TABLE.attack("stopped and traced children")
async def stopped(scene: Scene) -> None:
    """Children that stop themselves, in groups of their own -> all die with their command."""
    line = "for i in 1 2 3 4 5 6; do setsid sh -c 'kill -STOP $$' & done; sleep 60"
    check((await scene.box.exec(line, timeout_s=0.5)).timed_out, "it ended by itself")
    await calm(scene)


@TABLE.attack("daemons that flee", needs="separate_users")
async def daemons(scene: Scene) -> None:
    """A call leaves daemons that fork faster than one can list them -> none outlives the call."""
    source = """
import os, time
if os.fork() == 0:
    os.setsid()
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            if os.fork(): os._exit(0)
        except OSError: pass
"""
    await scene.box.python(source, timeout_s=2)
    await calm(scene)


@TABLE.attack("agent stopped from outside", case=9, needs="!own_kernel")
async def agent_stopped(scene: Scene) -> None:
    """SIGSTOP of an idle sandbox's agent -> a health check marks it dead, with nobody asking for it."""
    marker = f"{time.monotonic_ns()}"
    process = await scene.box.start(["sleep", f"3600.{marker}"])
    victims: list[psutil.Process] = []
    for _ in range(100):  # it is there before it has become what it is to be
        victims = [
            p for p in psutil.process_iter(["cmdline"]) if f"3600.{marker}" in (p.info["cmdline"] or [])
        ]
        if victims:
            break
        await asyncio.sleep(0.05)
    check(bool(victims) and process.number == 1, "the sandbox's processes cannot be seen from the host")
    for parent in victims[0].parents():
        if "from agent.agent" in " ".join(parent.cmdline()) and "bwrap" not in parent.name():
            parent.suspend()
    deadline = time.monotonic() + 30
    while scene.box.id in {box.id for box in await scene.fleet.boxes()}:
        check(time.monotonic() < deadline, "the stopped agent still counts as alive after 30 s")
        await asyncio.sleep(0.2)
    await ended(scene.box)


@TABLE.attack("storm of commands", case=10)
async def command_storm(scene: Scene) -> None:
    """Two hundred commands at once -> every exit code comes back, and the next are served."""
    calls = [scene.box.exec(["sh", "-c", f"exit {n % 200}"], timeout_s=60) for n in range(200)]
    results = await asyncio.gather(*calls)
    wrong = [n for n, result in enumerate(results) if result.exit_code != n % 200]
    check(not wrong, f"exit codes of {len(wrong)} commands were lost")
    await calm(scene)


@TABLE.attack("more commands than the queue takes", case=10)
async def queue(scene: Scene) -> None:
    """Twelve hundred slow commands on one sandbox -> what is too much is refused as busy, at once."""
    calls = [asyncio.create_task(typed(scene.box.exec(["sleep", "30"]))) for _ in range(1200)]
    done, waiting = await asyncio.wait(calls, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(1)
    refused = [call.result() for call in calls if call.done()]
    for call in waiting:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    check(done and refused, "nothing was refused")
    for error in refused:
        check(isinstance(error, RefusedError) and error.reason == "busy", f"refused otherwise: {error!r}")


@TABLE.attack("timers and pending signals")
async def timers(scene: Scene) -> None:
    """As many timers and queued signals as the kernel gives -> the sandbox still answers."""
    source = """
import ctypes, signal, os
libc, n = ctypes.CDLL(None, use_errno=True), 0
signal.pthread_sigmask(signal.SIG_BLOCK, {40})
made = ctypes.c_int()
while n < 200000 and libc.syscall(222, 1, 0, ctypes.byref(made)) == 0: n += 1
while n < 400000 and libc.sigqueue(os.getpid(), 40, 0) == 0: n += 1
"""
    await scene.python(source, 5)
    await calm(scene)


@TABLE.attack("the sandbox's clock")
async def clock(scene: Scene) -> None:
    """Sets the time by every call that can -> refused, and the deadline of a command still counts."""
    await scene.says(
        """
import ctypes, time
libc, got = ctypes.CDLL(None, use_errno=True), []
for name, number, args in (
    ('settimeofday', 164, (bytes(16), 0)), ('clock_settime', 227, (0, bytes(16))),
    ('adjtimex', 159, ((1).to_bytes(4, 'little') + bytes(204),)),
    ('clock_adjtime', 305, (0, (0x100).to_bytes(4, 'little') + bytes(204))),
):
    if libc.syscall(number, *args) >= 0: got.append(name)
print(got)
""",
        b"[]",
    )
    check((await scene.box.exec(["sleep", "60"], timeout_s=0.3)).timed_out, "its deadline did not count")
