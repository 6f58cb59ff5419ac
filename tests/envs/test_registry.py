import importlib
import pickle
import sys
import textwrap

import pytest

import envs
from envs.plugins import (
    BrokenPluginError,
    DuplicateNameError,
    PluginError,
    UnknownNameError,
    UnknownOptionError,
)
from envs.registry import ENVIRONMENTS
from envs.template import init_template
from envs.types import ToolCall

SHORTEST = """\
import random
from envs import Task, env

@env("demo/add", splits=("train", "eval"))
def add(split, seed, highest=9):
    draw = random.Random(f"{split}/{seed}")
    while True:
        a, b = draw.randint(1, highest), draw.randint(1, highest)
        if ((a + b) % 4 == 0) == (split == "eval"):
            yield Task.ask(f"{a}+{b}", f"{a}+{b}=", gold=str(a + b))

@add.reward
def exact(task, trajectory):
    return float(trajectory.answer == task.gold)
"""


@pytest.fixture(autouse=True)
def _forget():
    known = dict(ENVIRONMENTS.registered)
    yield
    ENVIRONMENTS.registered.clear()
    ENVIRONMENTS.registered.update(known)


@pytest.fixture
def write(tmp_path):
    def _write(source, name="add.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(source))
        return path

    return _write


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a distribution the way an installer does: a module and its metadata on the path."""
    monkeypatch.syspath_prepend(tmp_path)
    installed = []

    def _install(module, source, points, group="tempering.envs"):
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n" + "\n".join(points) + "\n")
        installed.append(module)
        importlib.invalidate_caches()

    yield _install
    for module in installed:
        sys.modules.pop(module, None)


def test_the_shortest_environment_is_one_file_of_at_most_15_lines(write):
    assert len(SHORTEST.splitlines()) <= 15
    env = envs.load(str(write(SHORTEST)), highest=5)
    assert env.name == "demo/add" and env.splits == ("train", "eval") and env.max_turns == 1
    tasks = env.tasks("train", 0)
    assert all(max(map(int, next(tasks).id.split("+"))) <= 5 for _ in range(50))


def test_builtins_are_listed_and_loaded_by_name():
    assert {"calc", "recall", "sort", "probe", "reasoning_gym"} <= set(envs.list_environments())
    for name in ("calc", "recall", "sort", "probe"):
        env = envs.load(name)
        assert env.name == name and next(env.tasks("train", 0)).prompt


def test_an_unknown_name_gives_the_nearest_one_and_the_next_step():
    with pytest.raises(UnknownNameError, match=r"'clac'.*Did you mean 'calc'.*recall.*tempering\.envs"):
        envs.load("clac")


def test_an_unknown_option_gives_the_nearest_one():
    with pytest.raises(UnknownOptionError, match=r"'lenght'.*Did you mean 'length'"):
        envs.load("recall", lenght=3)
    with pytest.raises(UnknownOptionError, match=r"no option 'x'.*none"):
        envs.load("calc", x=1)


def test_an_installed_package_is_found_by_its_entry_point(install):
    install("one_pkg", SHORTEST, ["demo/add = one_pkg:add"])
    assert envs.list_environments()["demo/add"] == "one_pkg:add"
    assert envs.load("demo/add").name == "demo/add"
    assert envs.load("demo/add").name == "demo/add"


def test_two_packages_with_one_name_are_refused_with_both_origins(install):
    install("two_a", SHORTEST.replace("demo/add", "a/add"), ["demo/add = two_a:add"])
    install("two_b", SHORTEST.replace("demo/add", "b/add"), ["demo/add = two_b:add"])
    with pytest.raises(DuplicateNameError, match=r"two_[ab]:add and from two_[ab]:add"):
        envs.load("demo/add")
    assert envs.load("two_a:add").name == "a/add"


def test_registering_a_name_twice_is_refused_with_both_origins(write):
    envs.load(str(write(SHORTEST)))
    with pytest.raises(DuplicateNameError, match=r"add\.py:add and from .*other\.py:add"):
        envs.load(str(write(SHORTEST, "other.py")))


def test_a_builtin_name_cannot_be_taken(write):
    with pytest.raises(DuplicateNameError, match=r"envs\.calc:calc and from .*add\.py:add"):
        envs.load(str(write(SHORTEST.replace("demo/add", "calc"))))


def test_a_file_can_be_loaded_again_after_an_edit(write):
    envs.load(str(write(SHORTEST)))
    env = envs.load(str(write(SHORTEST.replace("highest=9", "highest=1"))))
    assert next(env.tasks("train", 0)).id == "1+1"


def test_a_broken_package_chains_its_import_error(install):
    install("broken_pkg", "import no_such_module\n", ["demo/broken = broken_pkg:add"])
    with pytest.raises(BrokenPluginError, match=r"no_such_module.*python -c 'import broken_pkg'") as caught:
        envs.load("demo/broken")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_broken_file_chains_its_error(write):
    path = write("1/0\n")
    with pytest.raises(BrokenPluginError, match=r"ZeroDivisionError") as caught:
        envs.load(str(path))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_entry_point_without_its_attribute_is_broken(install):
    install("hollow_pkg", "", ["demo/hollow = hollow_pkg:add"])
    with pytest.raises(BrokenPluginError, match="hollow_pkg"):
        envs.load("demo/hollow")


def test_a_missing_file_and_an_empty_file_say_so(tmp_path, write):
    with pytest.raises(UnknownNameError, match="there is no file"):
        envs.load(str(tmp_path / "missing.py"))
    with pytest.raises(UnknownNameError, match="0 environments"):
        envs.load(str(write("x = 1\n")))


def test_one_of_several_environments_of_a_file_is_named_after_a_colon(write):
    path = write(SHORTEST + SHORTEST.replace("add", "sum2").replace("exact", "exact2"))
    with pytest.raises(UnknownNameError, match=r"2 environments.*demo/add, demo/sum2"):
        envs.load(str(path))
    assert envs.load(f"{path}:sum2").name == "demo/sum2"
    assert envs.load(f"{path}:demo/add").name == "demo/add"
    with pytest.raises(UnknownNameError, match="Did you mean 'demo/sum2'"):
        envs.load(f"{path}:demo/sun2")


PLAIN_CLASS = """
    from envs import Score, Task

    class Echo:
        name, splits, tools, sandbox = "echo", ("train",), (), None
        max_turns, reward_name, efforts = 1, "", (50,)

        def __init__(self, word="hi"):
            self.word = word
        def tasks(self, split, seed):
            yield Task.ask("echo", self.word, gold=self.word)
        def demonstrations(self, split, seed):
            return iter(())
        async def setup(self, task, sandbox): ...
        async def cleanup(self, task, sandbox): ...
        async def call_tool(self, call, task, sandbox): ...
        async def score(self, task, trajectory):
            return Score(float(trajectory.answer == task.gold))
"""


def test_a_plain_class_is_an_environment_too(write):
    path = write(PLAIN_CLASS)
    env = envs.load(str(path), word="ho")
    assert next(env.tasks("train", 0)).gold == "ho"
    with pytest.raises(UnknownOptionError, match="Did you mean 'word'"):
        envs.load(str(path), wrod="ho")


def test_what_is_no_environment_is_refused_with_what_it_lacks(install):
    install("odd_pkg", "class Odd:\n    name = 'odd'\n", ["odd = odd_pkg:Odd"])
    with pytest.raises(BrokenPluginError, match=r"Odd that lacks splits.*envs\.base\.Environment"):
        envs.load("odd")


def test_an_environment_survives_pickling_with_its_options(write):
    for env in (envs.load("recall", length=20), envs.load(str(write(SHORTEST)), highest=3)):
        copy = pickle.loads(pickle.dumps(env))
        one, other = env.tasks("eval", 4), copy.tasks("eval", 4)
        assert [next(one) for _ in range(5)] == [next(other) for _ in range(5)]


def test_an_unknown_split_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="Did you mean 'train'"):
        envs.load("calc").tasks("trian", 0)


def test_a_generator_with_other_parameters_is_refused():
    with pytest.raises(ValueError, match="split, seed"):
        envs.env("demo/odd")(lambda n: iter(()))


async def test_typed_functions_are_tools_with_checked_arguments(write):
    source = SHORTEST + textwrap.dedent(
        '''
        from envs import ToolError

        @add.tool
        def halve(value: int, exact: bool = False) -> str:
            """Halves a number."""
            if value % 2 and exact:
                raise ToolError("odd")
            return str(value / 2 if exact else value // 2)

        @add.tool(stateless=True)
        async def place(number: int, word: str) -> str:
            return f"{word} is call {number}"
        '''
    )
    env = envs.load(str(write(source)))
    halve, place = env.tools
    assert env.max_turns == 8 and env.sandbox is None
    assert halve.description == "Halves a number." and not halve.stateless and place.stateless
    assert halve.parameters["properties"] == {"value": {"type": "integer"}, "exact": {"type": "boolean"}}
    assert halve.parameters["required"] == ["value"] and list(place.parameters["properties"]) == ["word"]
    task = next(env.tasks("train", 0))

    async def call(name, number=0, **arguments):
        return await env.call_tool(ToolCall(name, arguments, number=number), task, None)

    assert await call("halve", value=7) == "3"
    assert await call("place", 4, word="this") == "this is call 4"
    faults = [
        (call("halve"), "missing value"),
        (call("halve", value="7"), "value is no integer"),
        (call("halve", value=True), "value is no integer"),
        (call("halve", value=1, base=2), "unknown base"),
        (call("halve", value=7, exact=True), "odd"),
        (call("double", value=7), "unknown tool double"),
    ]
    for fault, text in faults:
        with pytest.raises(envs.ToolError, match=text):
            await fault
    with pytest.raises(ValueError, match="without number"):
        await call("place", None, word="this")


def test_a_tool_without_type_hints_is_refused(write):
    with pytest.raises(BrokenPluginError, match="str, int, float"):
        envs.load(str(write(SHORTEST + "\n@add.tool\ndef f(x): ...\n")))


def test_a_tool_that_takes_a_sandbox_makes_the_environment_need_one(write):
    env = envs.load(str(write(SHORTEST + "\n@add.tool\ndef f(x: str, sandbox) -> str: ...\n")))
    assert env.sandbox is not None


@pytest.mark.parametrize("name", ["add", "team/add-two", "random", "team/lambda", "env"])
def test_the_template_of_a_new_environment_works_as_it_is(write, name):
    path = write(init_template(name), "new.py")
    env = envs.load(str(path))
    assert env.name == name and next(env.tasks("train", 0)).gold


def test_the_template_refuses_a_name_that_is_none():
    with pytest.raises(ValueError, match="small letters"):
        init_template("My Env")


def test_every_error_is_a_plugin_error_and_a_value_error():
    for kind in (UnknownNameError, DuplicateNameError, BrokenPluginError, UnknownOptionError):
        assert issubclass(kind, PluginError) and issubclass(kind, ValueError)
