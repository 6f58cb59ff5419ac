"""What an engine does: everything, or one of the three kinds of work that scale on their own.

An encoding engine turns images into rows of the embedding. A prefill engine computes prompts, samples the
first token, and hands the request over by `Engine.export_state`. A decode engine takes it by `import_state`
and samples the rest; caches it had to give up under pressure it computes anew itself.
"""

from __future__ import annotations

from typing import Literal, get_args

from model.engine.errors import RoleError

Role = Literal["all", "encode", "prefill", "decode"]

_INSTEAD = {
    "encode": "it encodes images with encode_images",
    "prefill": "it takes prompts with submit and hands them over with export_state",
    "decode": "it takes requests with import_state",
}


def check_role(role: str) -> None:
    """Raises ValueError for an unknown role."""
    if role not in get_args(Role):
        raise ValueError(f"an engine's role is one of {', '.join(get_args(Role))}, not {role!r}")


def require(role: Role, work: Literal["encode", "prefill", "decode"], what: str) -> None:
    """Raises RoleError when an engine of `role` does not do `work`."""
    if role not in ("all", work):
        raise RoleError(f"an engine of role {role!r} does not {what}: {_INSTEAD[role]}; ask a {work} engine")
