"""Sessions: shell commands of which each starts where the one before left off.

Every command is a process of its own with a real exit code, a deadline and a tree that ends with it. What a
shell would remember goes back with the result and comes along with the next command, so a session survives
a timeout (it then stays as it was), a fork, a snapshot and a replay. Jobs in the background go on, but the
next command's `jobs` and `wait` do not know them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sandbox.channel import Header
from sandbox.errors import PolicyError, ProtocolError
from sandbox.types import ExecResult

if TYPE_CHECKING:
    from sandbox.remote import RemoteBox

_FD = {"bash": 198, "sh": 9}
_MAX_STATE = 120_000
_SAVE = {
    "bash": "pwd; declare -p; declare -f; shopt -p; set +o; alias -p",
    "sh": "pwd; export -p",
}
_WRAP = """
__save() {{ __code=$?; {{ {save}; }} >&{fd} 2>/dev/null; exit $__code; }}
eval "$1" 2>/dev/null
trap __save EXIT
set -- "$2"
eval "$1"
"""


class Shell:
    """Made by `RemoteBox.shell`. One command at a time: the next needs the state that this one leaves.

    `kept` says whether the last one left one. A command that was killed, has a trap of its own on EXIT, is
    replaced by `exec`, or leaves more than 120 KB leaves the session as it was. Of `sh`, only the folder and
    exported variables are kept; `bash` keeps functions, aliases, options and all variables.
    """

    def __init__(self, box: RemoteBox, cwd: str, env: dict[str, str], program: str):
        if program not in _SAVE:
            raise PolicyError(f"a session's shell is one of {', '.join(_SAVE)}, not {program!r}")
        self._box, self._env, self._program = box, env, program
        self.cwd, self._state, self.kept = cwd, "", False

    async def exec(
        self,
        command: str,
        *,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        user: int | None = None,
        output_limit: int = 1 << 20,
        idempotent: bool = False,
    ) -> ExecResult:
        """Runs a shell line where the one before left off; see `sandbox.base.Sandbox.exec`."""
        script = _WRAP.format(save=_SAVE[self._program], fd=_FD[self._program])
        header: Header = {
            "op": "exec", "argv": [self._program, "-c", script, self._program, self._state, command],
            "env": {**self._env, **(env or {})}, "cwd": self.cwd, "state": _FD[self._program],
        }  # fmt: skip
        if user is not None:
            header["user"] = user
        outcome = await self._box.run(header, stdin, timeout_s, output_limit, idempotent)
        self.kept = bool(outcome.extra) and outcome.result.exit_code is not None
        self.kept = self.kept and len(outcome.extra) <= _MAX_STATE
        if self.kept:
            self._keep(outcome.extra)
        return outcome.result

    def _keep(self, state: bytes) -> None:
        cwd, _, rest = state.decode(errors="surrogateescape").partition("\n")
        if not cwd.startswith("/"):
            raise ProtocolError("the state of a session does not begin with a folder")
        self.cwd, self._state = cwd, rest
