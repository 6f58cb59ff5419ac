"""Attacks by the resident agent itself, as if untrusted code had taken it over: what it says and may.

The program that takes the agent's place (`sandbox_attack_node.py` puts it there) has the agent's channel, its
user and its capabilities, and no filter of system calls, which the agent gives itself.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from benchmarks.sandbox_attack_kit import CANARY, QUICK_S, SPEC, Scene, Table, check, typed
from benchmarks.sandbox_attack_node import AGENT
from sandbox.client import RemoteBox
from sandbox.errors import LostError, ProtocolError, SandboxError

TABLE = Table("hostile agent")

_PRELUDE = r"""
import ctypes, json, os, struct, sys, time
HEADER = struct.Struct("!II")
libc = ctypes.CDLL(None, use_errno=True)
if place := json.loads(sys.argv[1])["channel"]:
    import socket
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(place)
    for fd in (0, 1): os.dup2(channel.fileno(), fd)
seq = 0
def read(size):
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more: os._exit(0)
        data += more
    return data
def receive():
    head, body = HEADER.unpack(read(8))
    return json.loads(read(head)), read(body)
def send(data):
    view = memoryview(data)
    while view: view = view[os.write(1, view[:65536]):]
def frame(fields, body=b""):
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return HEADER.pack(len(text), len(body)) + text + body
def good(number, body=b"", **changes):
    global seq
    seq += 1
    return frame({"id": number, "seq": seq, "exit_code": 0, "signal": None, "stdout_bytes": len(body),
        "stderr_bytes": 0, "disk_full": False, "truncated": False, "timed_out": False, "cancelled": False,
        "dirty": False, "duration_s": 0.1, **changes}, body)
def ping():
    send(good(receive()[0]["id"]))
ping()
"""


async def taken_over(scene: Scene, program: str) -> RemoteBox:
    """Starts a sandbox whose agent answers the first ping and then runs `program`."""
    spec = replace(SPEC, labels={AGENT: _PRELUDE + program}, journal=False)
    return await scene.fresh(spec)


async def confession(scene: Scene, look: str) -> bytes:
    """Returns what a program in the agent's place says for the first command."""
    reply = "header, _ = receive()\nsend(good(header['id'], repr(got).encode()))\ntime.sleep(60)"
    program = f"got = []\n{look}\n{reply}"
    box = await taken_over(scene, program)
    return (await box.exec("true", timeout_s=20)).stdout


LIES = {
    "a reply to nothing": "send(good(n + 7))",
    "a reply twice": "send(good(n)); send(good(n)); receive()",
    "a number that is a truth value": "send(good(True))",
    "out of sequence": "seq += 5; send(good(n))",
    "more than was asked for": "send(good(n, bytes(50 << 20)))",
    "a giant announced": "send(HEADER.pack(1 << 31, 1 << 31))",
    "noise": "send(os.urandom(5000))",
    "no object": "send(frame(b'[1]'))",
    "no JSON": "send(frame(b'{' * 100))",
    "depth": "send(frame(b'[' * 200000))",
    "a number of a hundred thousand digits": "send(frame(b'{\"id\": ' + b'1' * 100000 + b'}'))",
    "output that nobody asked for": "send(frame({'id': n, 'seq': 2, 'event': 0}, b'x'))",
    "output of a kind that is none": "send(frame({'id': n, 'seq': 2, 'event': 7}, b'x'))",
    "no exit code": "send(good(n, exit_code='0'))",
    "a true exit code": "send(good(n, exit_code=True))",
    "an exit code of a million digits": "send(good(n, exit_code=10 ** 3000))",
    "a negative exit code": "send(good(n, exit_code=-1))",
    "an exit code that is none": "send(good(n, exit_code=256))",
    "a signal that is none": "send(good(n, signal=4000))",
    "negative bytes": "send(good(n, stdout_bytes=-1, stderr_bytes=1))",
    "bytes that are not there": "send(good(n, stdout_bytes=9))",
    "bytes too many": "send(good(n, b'x' * 50))",
    "an endless duration": "send(good(n, duration_s=float('inf')))",
    "no duration": "send(good(n, duration_s=float('nan')))",
    "a negative duration": "send(good(n, duration_s=-5))",
    "half a frame, then the end": "send(good(n)[:9]); os._exit(0)",
}


@TABLE.attack("lies on the channel", case=None)
async def lies(scene: Scene) -> None:
    """Twenty-six replies of a wrong shape, number, size or order.

    -> each ends the sandbox with a typed reason.
    """
    believed: list[str] = []
    for name, lie in LIES.items():
        extra = ", stderr_bytes=50" if name == "bytes too many" else ""
        lie = lie.replace("b'x' * 50", f"b'x' * 50{extra}")
        box = await taken_over(scene, f"n = receive()[0]['id']\n{lie}\ntime.sleep(60)")
        first = await typed(box.exec("true", timeout_s=20, output_limit=100))
        second = first if first else await typed(box.exec("true", timeout_s=1))
        if not isinstance(second, ProtocolError | LostError):
            believed.append(f"{name} ({second!r})")
        elif len(str(second)) > 400 or not str(second).isprintable():
            believed.append(f"{name} (its error carries {len(str(second))} characters)")
        await box.close()
        if believed:
            break
    check(not believed, f"believed: {', '.join(believed)}")


@TABLE.attack("forged errors and names")
async def forged(scene: Scene) -> None:
    """Error texts, file lists and trees with escapes, links and wrong types -> clean text, or an error."""
    text = r"\x1b[2J\x1b]0;owned\x07\r\n\u202e" + "A" * 100
    box = await taken_over(scene, f"while True: n = receive()[0]['id']; send(good(n, error='{text}'))")
    error = await typed(box.exec("true"))
    check(isinstance(error, SandboxError) and str(error).isprintable(), f"its error is {str(error)!r:.300}")
    for line in ('{"path": 7}', '{"path": "x", "kind": 5, "size": "y", "mode": [], "mtime": {}, "uid": null, '
                 '"target": 0}', "[]", "\\xff"):  # fmt: skip
        box = await taken_over(scene, f"while True: n = receive()[0]['id']; send(good(n, b'''{line}'''))")
        error = await typed(box.list_files())
        check(isinstance(error, SandboxError), f"a list of {line} was believed")
    box = await taken_over(
        scene,
        "while True: n = receive()[0]['id']; send(good(n, exit_code=1, stdout_bytes=0, stderr_bytes=9, "
        "disk_full=False).replace(b'@', b'') if False else good(n, b'\\x1b[2Jevil\\n', exit_code=1, "
        "stdout_bytes=0, stderr_bytes=9))",
    )
    error = await typed(box.read_file("/x"))
    check(isinstance(error, SandboxError) and str(error).isprintable(), f"its error is {str(error)!r}")


@TABLE.attack("silence")
async def silence(scene: Scene) -> None:
    """Never answers, never reads, or answers byte by byte -> lost soon after the deadline, the rest go on."""
    programs = ("time.sleep(60)", "n = receive()[0]['id']\nfor b in good(n): send(bytes([b])); time.sleep(1)",
                "n = receive()[0]['id']; send(HEADER.pack(200000, 0)); time.sleep(60)")  # fmt: skip
    boxes = [await taken_over(scene, program) for program in programs]
    start = time.monotonic()
    sent = bytes(8 << 20)
    errors = await asyncio.gather(*(typed(box.exec("true", stdin=sent, timeout_s=0.5)) for box in boxes))
    check(time.monotonic() - start < 20, "the wait was too long")
    for error in errors:
        check(isinstance(error, LostError | ProtocolError), f"it ended as {error!r}")


@TABLE.attack("floods")
async def floods(scene: Scene) -> None:
    """Writes without end to every stream it has, and answers nothing -> ended, siblings hardly notice."""
    programs = (
        "receive()\nwhile True: send(bytes(65536))",
        "receive()\nwhile True: send(good(1))",
        "receive()\nwhile True: os.write(2, b'x' * 65536)",
        "while True: os.write(2, b'x' * 65536)",
        "n = receive()[0]['id']\nwhile True: send(frame({'id': n, 'seq': 2, 'event': 0}, b''))",
    )
    for program in programs:
        box = await taken_over(scene, program)
        call = asyncio.create_task(typed(box.exec("true", timeout_s=1)))
        start = time.monotonic()
        await scene.answers(scene.sibling)
        check(time.monotonic() - start < QUICK_S, "the sibling waits")
        error = await call
        check(isinstance(error, LostError | ProtocolError), f"it ended as {error!r}")
        await box.close()


@TABLE.attack("what an agent may", needs="separate_users stateful")
async def powers(scene: Scene) -> None:
    """Counts the capabilities it has, and those of a program that it starts.

    -> change user, kill, no others.
    """
    look = """
import subprocess
text = open('/proc/self/status').read()
text += subprocess.run(['/usr/bin/cat', '/proc/self/status'], capture_output=True, text=True).stdout
for line in text.splitlines():
    if line[:6] in ('CapInh', 'CapPrm', 'CapEff', 'CapAmb'):
        have = int(line.split()[1], 16) & ~((1 << 5) | (1 << 6) | (1 << 7))
        if have: got.append(line)
"""
    check((said := await confession(scene, look)) == b"[]", f"it has {said!r}")


@TABLE.attack("an agent that breaks out", needs="!own_kernel stateful")
async def breakout(scene: Scene) -> None:
    """Mounts, makes devices, traces, loads, sets clocks and host names, kills all it sees -> refused."""
    look = r"""
NEW = 0x10000000
def attempt(name, number, *args):
    if libc.syscall(number, *args) >= 0: got.append(name)
attempt('mount', 165, b'none', b'/tmp', b'tmpfs', 0, 0)
attempt('bind', 165, b'/', b'/tmp', None, 4096, 0)
attempt('remount', 165, None, b'/', None, 4096 | 32, None)
attempt('umount', 166, b'/proc/sys', 2)
attempt('mknod', 133, b'/dev/sda1', 0o60666, 0x800)
attempt('chroot', 161, b'/tmp')
attempt('sethostname', 170, b'evil', 4)
attempt('settime', 164, (0).to_bytes(16, 'little'), 0)
attempt('reboot', 169, 0xfee1dead, 672274793, 0, 0)
attempt('iopl', 172, 3)
attempt('module', 175, 0, 0, b'')
attempt('chown', 92, b'/tmp', 1, 1)
attempt('raw', 41, 2, 3, 1)
attempt('packet', 41, 17, 3, 3)
attempt('net', 272, 0x40000000)
attempt('mnt', 272, 0x20000)
attempt('nice', 141, 0, 0, -20)
"""
    check((said := await confession(scene, look)) == b"[]", f"it could {said!r}")


@TABLE.attack("an agent that reads the host", needs="stateful masked_kernel")
async def host(scene: Scene) -> None:
    """Opens the kernel's and the host's files and pid 1's environment as root.

    -> nothing, no variable of the node.
    """
    look = r"""
for path in ('/proc/kcore', '/proc/kmsg', '/proc/kpagecgroup', '/proc/kpagecount', '/proc/kpageflags',
    '/proc/keys', '/proc/timer_list', '/proc/sched_debug', '/sys/firmware', '/etc/shadow', '/root',
    '/dev/mem', '/dev/vda'):
    try:
        if os.path.isdir(path):
            if os.listdir(path): got.append(path)
        elif os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 16): got.append(path)
    except OSError: pass
for path in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/proc/sys/kernel/modprobe',
    '/proc/sys/vm/drop_caches', '/sys/fs/cgroup/memory/release_agent', '/proc/sys/kernel/hostname'):
    try: os.close(os.open(path, os.O_WRONLY)); got.append(path)
    except OSError: pass
for pid in os.listdir('/proc'):
    if pid.isdigit():
        try: text = open('/proc/' + pid + '/environ').read()
        except OSError: continue
        if 'TEMPERING_' in text or 'PYTHONPATH' in text: got.append('environment of ' + pid)
"""
    check((said := await confession(scene, look)) == b"[]", f"it reads {said!r}")
    check(CANARY.encode() not in said, "it has the node's environment")


@TABLE.attack("an agent that changes the toolkit", case=27, needs="stateful")
async def toolkit(scene: Scene) -> None:
    """Writes into its own program's folder, the interpreter's and the system's.

    -> refused, siblings' are whole.
    """
    look = r"""
import glob
places = [p for p in ('/run/tempering/agent', '/tempering/agent', '/opt/tempering/agent') if os.path.isdir(p)]
places += glob.glob('/*/agent') + glob.glob('/*/*/agent') + ['/usr/bin', '/usr/lib', '/etc', '/bin', '/']
for place in dict.fromkeys(places):
    try: os.close(os.open(place + '/evil.py', os.O_CREAT | os.O_WRONLY)); got.append(place)
    except OSError: pass
    for path in glob.glob(place + '/*.py'):
        try: os.close(os.open(path, os.O_WRONLY)); got.append(path)
        except OSError: pass
"""
    said = await confession(scene, look)
    check(said == b"[]", f"it writes {said!r}")


@TABLE.attack("an agent that bombs", needs="process_limit memory_limit")
async def bomb(scene: Scene) -> None:
    """Forks, allocates and kills without end as root -> the sandbox's limits hold for it too."""
    programs = (
        "receive()\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "receive()\nheld = []\nwhile True: held.append(bytes(1 << 20))",
        "receive()\nos.kill(-1, 9); os.kill(1, 9); time.sleep(60)",
        "receive()\nos.close(0); os.close(1); time.sleep(60)",
    )
    for program in programs:
        box = await taken_over(scene, program)
        call = asyncio.create_task(typed(box.exec("true", timeout_s=1)))
        await scene.answers(scene.sibling)
        check(isinstance(await call, LostError | ProtocolError), "it ended otherwise")
        await box.close()
