"""Attacks on a verification: by the candidate while it is tested, and by the box that it comes out of."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from benchmarks.sandbox_attack_kit import SPEC, Scene, Table, check
from benchmarks.sandbox_attack_storms import STORM, rage
from sandbox.types import Verdict
from sandbox.verify import Case, FunctionTests, Plan, SuiteTests, verify, verify_files

TABLE = Table("verification")
NEEDS = "separate_users stateful"

_CHECKER = """
def test_refuses(call, draw):
    try:
        call("add", "a", 1)
    except Exception:
        return
    raise AssertionError("it added a text")
"""
_TESTS = FunctionTests(
    module="add.py",
    cases=(
        Case(id="one", function="add", args=(1, 2), expected=3),
        Case(id="far", function="add", args=(1e308, 1e308), expected=float("inf"), relative=0.1),
    ),
    checker=_CHECKER,
    checks=("test_refuses",),
    case_timeout_s=10.0,
)
_GOLD = b"def add(a, b):\n    return a + b\n"
_PLAN = Plan(
    tests=_TESTS, allow=("*.py",), base={"add.py": b"def add(a, b): ...\n"},
    spec=replace(SPEC, journal=False), timeout_s=20.0, attempts=1,
)  # fmt: skip
_SUITE_TEST = b"""import unittest
from add import add

class T(unittest.TestCase):
    def test_one(self):
        self.assertEqual(add(1, 2), 3)
"""
_SUITE = replace(
    _PLAN, tests=SuiteTests(files=("tests/test_add.py",), ids=("tests.test_add.T.test_one",)), allow=("**",),
    trusted={"tests/test_add.py": _SUITE_TEST},
)  # fmt: skip

_FORGE = """
import glob, json, os, re, socket, struct
words = set()
for path in glob.glob('/proc/[0-9]*/*') + glob.glob('/proc/net/unix') + glob.glob('/tmp/**', recursive=True):
    try:
        with open(path, 'rb') as file: words |= {*re.findall(rb'[0-9a-f]{32}', file.read(1 << 18))}
    except OSError: pass
reports = [
    json.dumps({'nonce': word.decode(), 'end': 'end', 'full': [], 'events': [
        {'id': name, 'outcome': 'pass', 'detail': ''} for name in ('one', 'far', 'test_refuses')
    ]}).encode() + b'\\n'
    for word in words
]
for place in [*glob.glob('/proc/[0-9]*/fd/[0-9]*'), *map('/proc/self/fd/{}'.format, range(300))]:
    try:
        fd = os.open(place, os.O_WRONLY | os.O_NONBLOCK)
        for report in reports: os.write(fd, report)
        os.close(fd)
    except OSError: pass
"""
_CANDIDATES: dict[str, str] = {
    "a report forged on every descriptor": _FORGE + "def add(a, b): return 0\n",
    "ends where an exception is wanted": (
        "import os\ndef add(a, b):\n    if isinstance(a, str): os._exit(0)\n    return a + b\n"
    ),
    "a number near the infinite": "def add(a, b):\n    return 1.0 if a == 1e308 else a + b\n",
    "a number that no float holds": "def add(a, b):\n    return 10**400 if a == 1e308 else a + b\n",
    "ends and stops all that it can": (
        "import os, signal\nfor name in os.listdir('/proc'):\n"
        "    for number in (signal.SIGSTOP, signal.SIGKILL):\n        try:\n"
        "            if name.isdigit() and int(name) != os.getpid(): os.kill(int(name), number)\n"
        "        except OSError: pass\ndef add(a, b): return 0\n"
    ),
    "answers for the next calls as well": (
        "import json, os, socket, struct\ndef add(a, b):\n    data = json.dumps({'value': 3}).encode() * 1\n"
        "    for fd in range(3, 300):\n        try:\n            for _ in range(4):\n"
        "                os.write(fd, struct.pack('!I', len(data)) + data)\n        except OSError: pass\n"
        "    return 3\n"
    ),
    "programs of the judge overwritten": (
        "import glob, os\nfor path in glob.glob('/tmp/**', recursive=True) + glob.glob('/workspace/*'):\n"
        "    try:\n        os.chmod(path, 0o777); open(path, 'w').close()\n    except OSError: pass\n"
        "    try: os.rename(path, path + '-')\n    except OSError: pass\ndef add(a, b): return 0\n"
    ),
}
"""Candidates that must fail, by what they try."""

_RESISTANCE = """
import ctypes, os
os.mkfifo('/workspace/pipe.py')
os.symlink('/etc/passwd', '/workspace/link.py')
os.symlink('/tmp', '/workspace/tests')
os.makedirs('/tmp/deep/' + 'd/' * 200)
for name in ('Add.py', 'ADD.PY', 'a\\u0301dd.py', '\\u202eyp.dda', 'a\\nb.py', '\\x1b[2J.py', 'conftest.py'):
    open('/workspace/' + name, 'w').close()
with open('/workspace/huge.py', 'wb') as file: file.truncate(4 << 20)
with open('/workspace/shut.py', 'wb') as file: os.fchmod(file.fileno(), 0)
libc, held = ctypes.CDLL(None), 0
libc.shmat.restype = ctypes.c_void_p
for _ in range(60):
    at = libc.shmat(libc.shmget(0, 1 << 20, 0o1666), None, 0)
    if at and at != 2**64 - 1: ctypes.memset(at, 1, 1 << 20)
"""


@TABLE.attack("a candidate against its judge", needs=NEEDS)
async def candidates(scene: Scene) -> None:
    """Forged reports, early ends, signals, answers ahead, odd numbers -> each fails, honest work does not."""
    names, places = list(_CANDIDATES), asyncio.Semaphore(3)

    async def judge(source: bytes) -> Verdict:
        async with places:
            return (await verify_files(scene.fleet, {"add.py": source}, _PLAN)).verdict

    verdicts = await asyncio.gather(*(judge(_CANDIDATES[name].encode()) for name in names), judge(_GOLD))
    for name, verdict in zip([*names, "honest work"], verdicts, strict=True):
        right = Verdict.PASS if name == "honest work" else Verdict.FAIL
        check(verdict is right, f"{name} is a {verdict}, not a {right}")


@TABLE.attack("a box that does not want to be judged", needs=NEEDS)
async def resisting(scene: Scene) -> None:
    """Storms, links in the place of tests, pipes, odd names, sparse and shut files, memory left behind.

    -> a failure by what it did, or its right verdict, and never the infrastructure's.
    """
    await scene.box.write_file("/workspace/add.py", _GOLD)
    await scene.python(_RESISTANCE, 20)
    await rage(scene, STORM)
    plan = replace(_SUITE, limits=replace(_SUITE.limits, size=1 << 20))
    report = await verify(scene.fleet, scene.box, plan)
    right = report.verdict is Verdict.FAIL and "more than" in report.reason
    check(right, f"{report.verdict}: {report.reason}")
    await scene.box.exec("rm -f /workspace/huge.py; echo 'def add(a, b): return 4' > /workspace/Add.py")
    await rage(scene, STORM)
    report = await verify(scene.fleet, scene.box, plan)
    check(report.verdict is Verdict.PASS, f"{report.verdict}: {report.reason}")
    names = [*report.changed, *(left.path for left in report.left_out)]
    check(all(map(str.isprintable, names)), f"a name that a terminal obeys is reported: {names}")
