"""Reads an agent's box once all of its processes are dead: the files that may count, and traces of cheating.

It opens regular files only, follows no link, and stops at its limits. What it writes is believed in nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from typing import Any

KINDS = {stat.S_IFREG: "file", stat.S_IFLNK: "link", stat.S_IFDIR: "folder"}
CHUNK, SMALL, LISTED, HITS = 1 << 20, 1 << 18, 1000, 200
NOT_SEARCHED = ("/proc", "/sys", "/dev/pts", "/dev/mqueue")


def walk(folder: str, budget: list[int]) -> Iterator[tuple[str, os.stat_result]]:
    """Yields all paths below a folder but folders, through no link and into no other kind of thing."""
    pending = [folder]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    budget[0] -= 1
                    if budget[0] < 0:
                        return
                    info = entry.stat(follow_symlinks=False)
                    if not stat.S_ISDIR(info.st_mode):
                        yield entry.path, info
                    elif not entry.path.startswith(NOT_SEARCHED):
                        pending.append(entry.path)
        except OSError:
            continue


def read(path: str, most: int) -> bytes | None:
    """Returns a regular file of at most `most` bytes; None for another, or when it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            info = os.fstat(fd)
            return file.read(most) if stat.S_ISREG(info.st_mode) and info.st_size <= most else None
    except OSError:
        return None


def has(path: str, word: bytes) -> bool:
    """Whether a regular file holds a text."""
    tail = b""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            while stat.S_ISREG(os.fstat(fd).st_mode) and (data := file.read(CHUNK)):
                if word in tail + data:
                    return True
                tail = data[-len(word) :]
    except OSError:
        pass
    return False


def refusal(path: str, info: os.stat_result, job: dict[str, Any]) -> str:
    """Says why a path does not count; empty when it may."""
    kind = KINDS.get(stat.S_IFMT(info.st_mode), "device")
    if kind != "file":
        return f"a {kind}"
    if info.st_mode & (stat.S_ISUID | stat.S_ISGID):
        return "it changes its user"
    if any(re.fullmatch(regex, path, re.DOTALL) for regex in job["deny"]):
        return "a hook"
    if path in job["trusted"]:
        return "a trusted file is put in its place"
    if not any(re.fullmatch(regex, path, re.DOTALL) for regex in job["allow"]):
        return "not among the files that count"
    return ""


def export(job: dict[str, Any]) -> dict[str, Any]:
    """Returns files (with content), what was left out, and which files of the base are gone."""
    root, budget = job["root"], [job["entries"]]
    files: dict[str, list[Any]] = {}
    left: list[list[str]] = []
    same: set[str] = set()
    base: dict[str, list[Any]] = job["base"]
    size = more = 0
    for full, info in walk(root, budget):
        path = os.path.relpath(full, root)
        known, bytes_known = base.get(path, ["", 0])
        data = read(full, max(job["size"], bytes_known))
        if data is not None and hashlib.sha256(data).hexdigest() == known:
            same.add(path)
            continue
        why = refusal(path, info, job)
        if not why and info.st_size > job["size"]:
            why, size = "too large", size + info.st_size
        why = why or ("not to be read" if data is None else "")
        if why:
            suspect = any(re.search(regex, path) for regex in job["suspects"])
            more += len(left) >= LISTED and not suspect
            left += [[path, why]] if suspect or len(left) < LISTED else []
            continue
        assert data is not None
        size += len(data)
        if size <= job["size"] and len(files) <= job["files"]:
            files[path] = [base64.b64encode(data).decode(), info.st_mode & 0o777]
    gone = [path for path in base if not os.path.lexists(os.path.join(root, path))]
    full = budget[0] < 0
    return {
        "files": files, "left": left[: 4 * LISTED], "more": more, "same": sorted(same), "gone": gone,
        "size": size, "full": full,
    }  # fmt: skip


def traces(job: dict[str, Any], same: set[str]) -> dict[str, Any]:
    """Returns where the canary is, and which small files, but for `same`, name what hooks are made of."""
    canary, words = job["canary"].encode(), [word.encode() for word in job["words"]]
    leaks: list[str] = []
    mentions: list[list[str]] = []
    elsewhere: list[str] = []
    if canary and any(canary.decode() in text for pair in os.environ.items() for text in pair):
        leaks.append("the environment")
    for place in job["search"]:
        for path, info in walk(place, [job["entries"]]):
            if canary and len(leaks) < HITS and has(path, canary):
                leaks.append(path)
            inside = path.startswith(job["root"] + "/")
            if not inside and len(elsewhere) < HITS and any(re.search(r, path) for r in job["suspects"]):
                elsewhere.append(path)
            known = inside and os.path.relpath(path, job["root"]) in same
            if known or len(mentions) >= HITS or info.st_size > SMALL or not words:
                continue
            data = read(path, SMALL) or b""
            mentions += [[path, word.decode()] for word in words if word in data]
    return {"leaks": leaks, "mentions": mentions, "elsewhere": elsewhere}


def main() -> None:
    """Reads the job, writes what it found."""
    job = json.loads(sys.stdin.buffer.read())
    found = export(job)
    sys.stdout.write(json.dumps({**found, **traces(job, set(found["same"]))}))
