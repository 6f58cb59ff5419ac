"""Attacks on what lasts from command to command: sessions, terminals, processes, streams, calls."""

from __future__ import annotations

import asyncio
import signal

from benchmarks.sandbox_attack_kit import Scene, Table, check, typed
from sandbox.errors import CommandError, PolicyError, ProtocolError, RefusedError, SandboxError

TABLE = Table("sessions")


@TABLE.attack("state of a session forged")
async def state(scene: Scene) -> None:
    """Writes noise, megabytes and lies to the descriptor of the session's state.

    -> the session stays usable.
    """
    shell = scene.box.shell()
    for line in (
        "head -c 3000000 /dev/zero >&198", "printf '/nowhere\\nexit 9\\n' >&198; exec 198>&-",
        "exec 198>&-; :",
        "printf 'no folder' >&198; trap - EXIT", "trap 'kill -9 $$' EXIT", "exec /usr/bin/true",
        "X=$(head -c 200000 /dev/zero | tr '\\0' x); export X",
    ):  # fmt: skip
        error = await typed(shell.exec(line, timeout_s=5))
        check(error is None or isinstance(error, ProtocolError | PolicyError), f"{line!r} ended as {error!r}")
    fresh = scene.box.shell()
    check((await fresh.exec("echo right")).stdout == b"right\n", "a new session is affected")
    await scene.answers()


@TABLE.attack("session that redefines everything")
async def redefined(scene: Scene) -> None:
    """Functions, aliases and options over every builtin -> that session is its own; no other one notices."""
    shell = scene.box.shell()
    await shell.exec(
        "eval() { :; }; trap() { :; }; exit() { :; }; set() { :; }; cd() { :; }; alias ls='rm -rf /'"
    )
    await shell.exec("set -eux; shopt -s expand_aliases; PATH=/nowhere; IFS=x; enable -n echo")
    other = scene.box.shell()
    check(
        (await other.exec("echo right; cd /tmp; pwd")).stdout == b"right\n/tmp\n",
        "another session is affected",
    )
    await scene.answers()


@TABLE.attack("flood of a terminal")
async def terminal(scene: Scene) -> None:
    """Escapes, titles and resizes without end on a terminal -> its last bytes are kept as bytes."""
    process = await scene.box.start(
        "while :; do printf '\\033[2J\\033]0;owned\\007\\033[6n\\033c\\016'; done",
        terminal=(24, 80),
        log_limit=4096,
    )
    for rows in range(1, 200, 10):
        await process.resize(rows, 300)
    await process.write(b"\x03" * 10 + b"x" * 1000)
    log = await process.logs(wait_s=2)
    check(0 < len(log.data) <= 4096, f"{len(log.data)} bytes were kept")
    await typed(process.signal(signal.SIGKILL))
    await scene.answers()


@TABLE.attack("errors with escapes")
async def escapes(scene: Scene) -> None:
    """A command fails with escapes and megabytes on stderr -> the error's text is short and printable."""
    result = await scene.box.exec("printf '\\033[2J\\033]0;owned\\007%0500000d' 1 >&2; exit 3")
    try:
        result.check()
    except CommandError as error:
        check(str(error).isprintable() and len(str(error)) < 1000, f"its text is {str(error)[:200]!r}")
    await scene.box.exec(["mkdir", "/workspace/\x1b[2Jevil"])
    error = await typed(scene.box.read_file("/workspace/\x1b[2Jevil"))
    check(isinstance(error, SandboxError) and str(error).isprintable(), f"its text is {str(error)!r}")


@TABLE.attack("input that is never read")
async def unread(scene: Scene) -> None:
    """Sixteen megabytes to a command and a process that read nothing -> no wait, no growth, busy."""
    result = await scene.box.exec("sleep 0.2; exit 5", stdin=bytes(16 << 20))
    check(result.exit_code == 5, f"it ended as {result.exit_code}")
    process = await scene.box.start(["sleep", "60"])
    errors = [await typed(process.write(bytes(400_000))) for _ in range(6)]
    check(any(isinstance(error, RefusedError) for error in errors), "all of it was taken")
    await scene.answers()


@TABLE.attack("background processes without end")
async def background(scene: Scene) -> None:
    """Starts processes until refused, of which each forks on -> a limit, and commands still run."""
    refused: list[SandboxError] = []
    for _ in range(40):
        if error := await typed(scene.box.start("sleep 300 & sleep 300")):
            refused.append(error)
    check(refused, "nothing was refused")
    check(all(isinstance(error, RefusedError) for error in refused), f"refused as {refused[0]!r}")
    await scene.answers()


@TABLE.attack("survivors fill the sandbox", needs="process_limit")
async def survivors(scene: Scene) -> None:
    """Commands leave daemons until no process is free -> the next command runs, its forerunners' ends."""
    for _ in range(3):
        await scene.box.exec("for i in $(seq 80); do setsid sleep 300 & done 2>/dev/null; :", timeout_s=10)
    await scene.answers()


@TABLE.attack("stream that nobody reads")
async def stream(scene: Scene) -> None:
    """Streams an endless output to a reader that pauses, then goes -> its command is killed, all go on."""
    async with scene.box.stream("yes", timeout_s=30, output_limit=64 << 20) as pieces:
        async for _ in pieces:
            await asyncio.sleep(0.5)
            break
        await scene.answers(scene.sibling)
    for _ in range(100):
        if (await scene.box.exec("cat /proc/[0-9]*/comm | grep -c yes")).stdout == b"0\n":
            break
        await asyncio.sleep(0.05)
    else:
        check(False, "the command lives on")
    await scene.answers()


@TABLE.attack("frames on its own stdout")
async def frames(scene: Scene) -> None:
    """A command prints bytes that look like frames and replies -> output like any other."""
    source = """
import json, os, struct
text = json.dumps({"id": 1, "seq": 1, "exit_code": 0}).encode()
os.write(1, (struct.pack("!II", len(text), 0) + text) * 50)
os.write(2, b"\\x01\\x00\\x00\\x00\\x00\\x00\\x00\\x05hello" * 50)
"""
    result = await scene.python(source)
    check(
        result.exit_code == 0 and len(result.stdout) > 1000 and result.stderr.count(b"hello") == 50, "changed"
    )
    inner = await scene.box.python(source)
    check(inner.stdout == result.stdout, "a call's output was changed")
    await scene.answers()


@TABLE.attack("call that hurts its interpreter", needs="separate_users")
async def interpreter(scene: Scene) -> None:
    """A call patches builtins, closes descriptors, corrupts memory, exits in odd ways.

    -> the next is as ever.
    """
    for source in (
        "import builtins, sys, os\nbuiltins.print = builtins.open = os._exit = None; sys.modules.clear()",
        "import os\nfor fd in range(1000):\n    try: os.close(fd)\n    except OSError: pass",
        "import ctypes; ctypes.string_at(0)", "import os; os.abort()", "import os; os.kill(os.getpid(), 9)",
        "raise SystemExit('x' * 10)", "import sys; sys.setrecursionlimit(1 << 30)\ndef f(): f()\nf()",
        "import threading, time; threading.Thread(target=time.sleep, args=(30,)).start()",
        "import atexit, time; atexit.register(time.sleep, 30)", "import gc, os; gc.disable(); os.chdir('/')",
        "import signal, os; os.killpg(0, 19)", "\0", "\ud800", "(" * 5000,
    ):  # fmt: skip
        error = await typed(scene.box.python(source, timeout_s=1))
        check(error is None, f"{source[:40]!r} ended as {error!r}")
    await scene.answers()


@TABLE.attack("call that leaves things behind", needs="separate_users")
async def leavings(scene: Scene) -> None:
    """A call leaves files, links, queues and processes everywhere -> the next finds none of them."""
    await scene.box.python("""
import ctypes, os, subprocess
libc = ctypes.CDLL(None)
for folder in ('/workspace', '/tmp', '/dev/shm'):
    os.makedirs(folder + '/d/e'); open(folder + '/f', 'w').write('x'); os.symlink('/etc', folder + '/l')
    os.mkfifo(folder + '/p'); os.chmod(folder + '/d', 0)
os.fork() or os.execv('/usr/bin/sleep', ['sleep', '4006'])
""")
    seen = await scene.box.exec(
        "find /workspace /tmp /dev/shm -mindepth 1; grep -l 4006 /proc/[0-9]*/cmdline"
    )
    check(
        seen.stdout == b"" or (seen.stdout.count(b"\n") <= 1 and b"/proc" in seen.stdout),
        f"left {seen.stdout!r}",
    )
    await scene.answers()


@TABLE.attack("commands out of reason")
async def odd(scene: Scene) -> None:
    """Arguments with zeros, of megabytes and by the thousand, odd folders and users.

    -> an error or a result.
    """
    for command, how in (
        (["echo", "a\0b"], {}), (["echo", *(["x" * 1000] * 200)], {}), (["echo", "x" * 250_000], {}),
        (["echo", "x" * (8 << 20)], {}), (["/nowhere"], {}), (["/workspace"], {}), ([""], {}),
        (["\ud800"], {}),
        (["true"], {"cwd": "/nowhere"}), (["true"], {"cwd": "\0"}), (["true"], {"user": 0}),
        (["true"], {"user": -1}), (["true"], {"env": {"A=B": "c\0"}}), (["true"], {"timeout_s": -1}),
        (["true"], {"output_limit": 1 << 40}), (["true"], {"timeout_s": float("nan")}),
        (["true"], {"env": {"LD_PRELOAD": "/workspace/x.so", "PATH": ""}}),
    ):  # fmt: skip
        error = await typed(scene.box.exec(command, **{"timeout_s": 5, **how}))
        check(error is None or isinstance(error, SandboxError), f"{str(command)[:40]} ended as {error!r}")
    await scene.answers()
