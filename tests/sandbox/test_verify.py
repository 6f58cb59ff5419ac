"""Verification in real boxes: what counts, what does not, and whose fault a missing verdict is."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox.client import Fleet, RemoteBox
from sandbox.errors import PolicyError
from sandbox.types import Limits, SandboxSpec, Verdict
from sandbox.verify import Case, DiffLimits, FunctionTests, Plan, SuiteTests, verify, verify_files

STUB = b"def add(a, b):\n    raise NotImplementedError\n"
GOLD = b"def add(a, b):\n    return a + b\n"
CHECKER = "def test_random(call, draw):\n    a = draw.randint(0, 99)\n    assert call('add', a, 1) == a + 1\n"
TEST = b"""import unittest
from add import add

class TestAdd(unittest.TestCase):
    def test_small(self):
        self.assertEqual(add(1, 2), 3)

    def test_large(self):
        self.assertEqual(add(10**6, 2), 1000002)
"""
FUNCTIONS = FunctionTests(
    module="add.py",
    cases=(
        Case(id="ints", function="add", args=(1, 2), expected=3),
        Case(id="near", function="add", args=(0.1, 0.2), expected=0.3, absolute=1e-9),
        Case(id="mixed", function="add", args=(1, "2"), raises="TypeError"),
    ),
    checker=CHECKER,
    checks=("test_random",),
    case_timeout_s=5.0,
)
SPEC = SandboxSpec(limits=Limits(memory_bytes=128 << 20, tmpfs_bytes=8 << 20), journal=False)
PLAN = Plan(tests=FUNCTIONS, allow=("*.py", "lib/**"), base={"add.py": STUB}, spec=SPEC, timeout_s=30.0)
SUITE = Plan(
    tests=SuiteTests(
        files=("tests/test_add.py",),
        ids=("tests.test_add.TestAdd.test_small", "tests.test_add.TestAdd.test_large"),
    ),
    allow=("**",),
    base={"add.py": STUB, "tests/test_add.py": TEST},
    trusted={"tests/test_add.py": TEST},
    spec=SPEC,
    timeout_s=30.0,
)


@pytest.fixture
async def light(state_dir: Path, request: pytest.FixtureRequest) -> Fleet:
    """A fleet of the light tier, for what does not depend on the tier."""
    return await Fleet.connect(backend="bubblewrap", state_dir=state_dir, owner=request.node.name)


@pytest.fixture
async def lightbox(light: Fleet):
    async with light, await light.create(SPEC) as box:
        yield box


async def test_a_solution_passes_and_nothing_does_not(fleet: Fleet, box: RemoteBox) -> None:
    await box.write_file("/workspace/add.py", STUB)
    nothing = await verify(fleet, box, PLAN)
    assert (nothing.verdict, nothing.score, nothing.changed, nothing.flags) == (Verdict.FAIL, 0.0, (), ())
    assert {test.id: test.outcome for test in nothing.tests} == dict.fromkeys(FUNCTIONS.ids, "fail") | {
        test.id: test.outcome for test in nothing.tests if test.id == "mixed"
    }
    await box.write_file("/workspace/add.py", GOLD)
    solved = await verify(fleet, box, PLAN)
    assert (solved.verdict, solved.reason, solved.score, solved.flags) == (Verdict.PASS, "", 1.0, ())
    assert solved.changed == ("add.py",)
    assert sorted(test.id for test in solved.tests) == sorted(FUNCTIONS.ids)


async def test_a_suite_is_restored_and_its_tests_are_counted(fleet: Fleet, box: RemoteBox) -> None:
    await box.write_file("/workspace/add.py", GOLD)
    await box.write_file("/workspace/tests/test_add.py", b"")
    report = await verify(fleet, box, SUITE)
    assert (report.verdict, report.kinds) == (Verdict.PASS, {"tests"})
    assert [left.path for left in report.left_out] == ["tests/test_add.py"]
    skipping = b"import unittest\ndef add(a, b):\n    raise unittest.SkipTest('later')\n"
    report = await verify_files(fleet, {"add.py": skipping}, SUITE)
    assert report.verdict is Verdict.FAIL
    assert {test.outcome for test in report.tests} == {"skip"}


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        (b"import os; os._exit(0)", "exit"),
        (b"import time\ndef add(a, b): time.sleep(100)", "timeout"),
        (b"import mmap\ndef add(a, b): return type('Any', (), {'__eq__': lambda s, o: True})()", "no_json"),
        (b"def add(a, b): return True", "fail"),
        (b"def add(a, b): return [[]] * 9", "fail"),
        (b"x = x", "load"),
    ],
)
async def test_what_a_candidate_does_is_a_failure(
    light: Fleet, lightbox: RemoteBox, source: bytes, outcome: str
) -> None:
    plan = replace(PLAN, tests=replace(FUNCTIONS, case_timeout_s=1.0))
    report = await verify_files(light, {"add.py": source}, plan)
    assert report.verdict is Verdict.FAIL
    assert outcome in {test.outcome for test in report.tests}


async def test_only_files_that_count_leave_the_box(light: Fleet, lightbox: RemoteBox) -> None:
    await lightbox.write_file("/workspace/add.py", GOLD)
    await lightbox.write_file("/workspace/notes.txt", b"mine")
    await lightbox.write_file("/workspace/lib/conftest.py", b"")
    script = (
        "ln -s /etc/passwd lib/link.py; mkfifo lib/pipe.py; cp add.py lib/tool.py; chmod u+s lib/tool.py; "
        "cp add.py lib/fine.py; cp add.py lib/closed.py; chmod 000 lib/closed.py; "
        "mkdir -p deep/er; echo > deep/er/x.py"
    )
    (await lightbox.exec(script)).check()
    report = await verify(light, lightbox, PLAN)
    assert report.verdict is Verdict.PASS
    assert report.changed == ("add.py", "lib/fine.py")
    assert {left.path: left.why for left in report.left_out} == {
        "notes.txt": "not among the files that count",
        "deep/er/x.py": "not among the files that count",
        "lib/conftest.py": "a hook",
        "lib/link.py": "a link",
        "lib/pipe.py": "a device",
        "lib/tool.py": "it changes its user",
        "lib/closed.py": "not to be read",
    }
    assert report.kinds == {"hooks", "links"}


async def test_a_diff_that_is_too_much_fails(light: Fleet, lightbox: RemoteBox) -> None:
    await lightbox.write_file("/workspace/add.py", GOLD + b"#" * 5000)
    for limits in (DiffLimits(size=4000), DiffLimits(files=1, size=10_000)):
        report = await verify(light, lightbox, replace(PLAN, limits=limits))
        assert (report.verdict, report.kinds) == (Verdict.FAIL, {"resources"})
        assert "more than" in report.reason
        await lightbox.write_file("/workspace/more.py", b"")


async def test_processes_are_dead_before_the_diff_is_read(light: Fleet, lightbox: RemoteBox) -> None:
    await lightbox.write_file("/workspace/add.py", GOLD)
    spin = "while true; do echo x > add.py; done"
    await lightbox.exec(f"(setsid sh -c '{spin}' >/dev/null 2>&1 &)")
    await lightbox.start(spin)
    waiting = asyncio.create_task(lightbox.exec("touch /tmp/on; sleep 100; echo done"))
    (await lightbox.exec("until [ -e /tmp/on ]; do :; done")).check()
    await lightbox.halt()
    assert (await waiting).exit_code is None
    await lightbox.write_file("/workspace/add.py", GOLD)
    report = await verify(light, lightbox, PLAN)
    assert report.verdict is Verdict.PASS
    assert await lightbox.read_file("/workspace/add.py") == GOLD
    left = await lightbox.exec("cat /proc/[0-9]*/comm | grep -c -x -e sleep -e setsid", timeout_s=10)
    assert left.stdout.strip() == b"0"


async def test_a_box_that_is_gone_is_infrastructure(light: Fleet, lightbox: RemoteBox) -> None:
    await lightbox.close()
    report = await verify(light, lightbox, PLAN)
    assert (report.verdict, report.score) == (Verdict.INFRASTRUCTURE, None)
    assert report.reason.startswith("the agent's box: LostError")


async def test_a_verifier_without_room_or_time_is_infrastructure(light: Fleet, lightbox: RemoteBox) -> None:
    full = replace(PLAN, spec=replace(SPEC, limits=Limits(tmpfs_bytes=8192)), attempts=1)
    report = await verify_files(light, {"add.py": GOLD}, full)
    assert report.verdict is Verdict.INFRASTRUCTURE
    assert "DiskFullError" in report.reason
    late = await verify_files(light, {"add.py": GOLD}, replace(PLAN, start_s=1e-4))
    assert (late.verdict, late.attempts) == (Verdict.INFRASTRUCTURE, 2)
    assert "did not start" in late.reason


async def test_a_verifier_box_that_dies_is_infrastructure(light: Fleet, lightbox: RemoteBox) -> None:
    hang = b"import time\ntime.sleep(1000)\n"
    plan = replace(PLAN, tests=replace(FUNCTIONS, case_timeout_s=60.0), timeout_s=60.0, attempts=1)
    judging = asyncio.create_task(verify_files(light, {"add.py": hang}, plan))
    other: list[RemoteBox] = []
    while not other:
        await asyncio.sleep(0.02)
        other = [box for box in await light.boxes() if box.id != lightbox.id]
    await other[0].close()
    report = await judging
    assert report.verdict is Verdict.INFRASTRUCTURE
    assert report.reason.startswith("the verifier's box:")


async def test_a_missing_framework_is_infrastructure(light: Fleet, lightbox: RemoteBox) -> None:
    tests = SuiteTests(framework="pytest", files=("tests/test_add.py",), ids=("tests/test_add.py::test_a",))
    plan = replace(SUITE, tests=tests, attempts=1)
    forged = {"add.py": GOLD, "pytest.py": b"raise SystemExit(0)\n"}
    report = await verify_files(light, forged, plan)
    assert report.verdict is Verdict.INFRASTRUCTURE
    assert "python_path" in report.reason


async def test_what_the_fleet_does_not_offer_is_an_error(light: Fleet, lightbox: RemoteBox) -> None:
    with pytest.raises(PolicyError):
        await verify_files(light, {"add.py": GOLD}, replace(PLAN, spec=SandboxSpec(image="no-such-image")))
    with pytest.raises(ValueError, match=r"\.\./add"):
        await verify_files(light, {"../add.py": GOLD}, PLAN)


async def test_deleted_files_stay_deleted(light: Fleet, lightbox: RemoteBox) -> None:
    plan = replace(PLAN, base={"add.py": STUB, "lib/old.py": b"", "lib/kept.py": b""})
    source = b"import os\ndef add(a, b): return a + b + os.path.exists('/workspace/lib/old.py')\n"
    await lightbox.write_file("/workspace/add.py", source)
    await lightbox.write_file("/workspace/lib/kept.py", b"")
    report = await verify(light, lightbox, plan)
    assert (report.verdict, report.changed) == (Verdict.PASS, ("add.py", "lib/old.py"))
