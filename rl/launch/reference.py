"""Writes docs/configuration.md: `python -m rl.launch.reference > docs/configuration.md`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from rl.launch.compose import config_groups, load_config, section_fields, section_of
from rl.launch.config import RunConfig
from rl.launch.resume import flat

_HEAD = """\
# Configuration

A setting is `section.key=value`; a preset of a section is chosen by `section=name`, and `experiment=name`
chooses many at once. A key that does not exist is refused, also with `+`, and the nearest one is named;
`temper train experiment=calc --print-config` prints all values of an experiment. `resume`, `clean`, `name`
and `seed` may be written without `run.`.
"""


def reference() -> Iterator[str]:
    """Yields the page as lines."""
    yield from [*_HEAD.splitlines(), "", "## Presets", "", "| group | presets |", "|---|---|"]
    for group, names in sorted(config_groups().items()):
        yield f"| `{group}` | {', '.join(f'`{name}`' for name in names)} |"
    tree = load_config([]).model_dump(mode="json")
    for section, kind in section_fields(RunConfig).items():
        yield from _section(section, section_of(kind), tree[section])


def _section(name: str, kind: Any, values: dict[str, Any]) -> Iterator[str]:
    yield from ["", f"## {name}", "", _summary(kind), "", "| key | default | |", "|---|---|---|"]
    meaning = _attributes(kind)
    for key, value in flat(values).items():
        yield f"| `{name}.{key}` | `{_text(value)}` | {meaning.get(key.split('.')[0], '')} |"


def _summary(kind: Any) -> str:
    text = re.split(r"\n\s*(?:Attributes|Raises):", inspect.getdoc(kind) or "")[0]
    return " ".join(text.split())


def _attributes(kind: Any) -> dict[str, str]:
    lines: list[tuple[str, str]] = []
    for each in reversed(kind.__mro__):
        found = re.search(r"Attributes:\n(.*?)(?:\n\n|\Z)", inspect.getdoc(each) or "", re.DOTALL)
        lines += re.findall(r"^ {4}(\w+): (.*(?:\n {6,}.*)*)", found[1], re.MULTILINE) if found else []
    return {key: " ".join(text.split()).replace("|", "\\|") for key, text in lines}


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return "''" if value == "" else str(value)


if __name__ == "__main__":
    print("\n".join(reference()))
