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
import time
from collections.abc import Iterator
from typing import Any

KINDS = {stat.S_IFREG: "file", stat.S_IFLNK: "link", stat.S_IFDIR: "folder"}
CHUNK, SMALL, LISTED, HITS, NAME = 1 << 20, 1 << 18, 500, 200, 255
SEARCH_S = 40.0
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
    """Whether a regular file holds a text; holes in it, which cost nothing to make, are not read."""
    tail = b""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb", buffering=0) as file:
            while stat.S_ISREG(os.fstat(fd).st_mode):
                at = os.lseek(fd, 0, os.SEEK_CUR)
                if os.lseek(fd, at, os.SEEK_DATA) != at:
                    tail = b""
                data = file.read(CHUNK)
                if word in tail + data:
                    return True
                if not data:
                    return False
                tail = data[-len(word) :]
    except OSError:  # it cannot be read, or has nothing but a hole behind this place
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
    if len(path) > NAME or shown(path) != path:
        return "its name is too long, or no text"
    return ""


def shown(path: str) -> str:
    """Returns a path as text that can be printed."""
    text = path.encode(errors="backslashreplace").decode()
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)[:NAME]


class Found:
    """The diff as it is collected."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.files: dict[str, list[Any]] = {}
        self.left: list[list[str]] = []
        self.suspects: list[list[str]] = []
        self.same: set[str] = set()
        self.size = self.more = 0

    def full(self) -> bool:
        """Whether there is more than is taken."""
        return self.size > self.job["size"] or len(self.files) > self.job["files"]

    def leave(self, path: str, why: str) -> None:
        """Notes a path that does not count; suspicious ones in a list of their own."""
        suspect = any(re.search(regex, path) for regex in self.job["suspects"])
        notes = self.suspects if suspect else self.left
        if len(notes) < LISTED:
            notes.append([shown(path), why])
        else:
            self.more += 1

    def take(self, full: str, path: str, info: os.stat_result) -> None:
        """Takes one path: it is as it was, or counts, or is left out."""
        digest, size = self.job["base"].get(path, ["", -1])
        if size == info.st_size:
            data = read(full, size)
            if data is not None and hashlib.sha256(data).hexdigest() == digest:
                self.same.add(path)
                return
        why = refusal(path, info, self.job)
        if why:
            self.leave(path, why)
            return
        self.size += info.st_size
        if self.full():
            return
        data = read(full, info.st_size)
        if data is None:
            self.leave(path, "not to be read")
            return
        self.files[path] = [base64.b64encode(data).decode(), info.st_mode & 0o777]


def export(job: dict[str, Any]) -> dict[str, Any]:
    """Returns files (with content), what was left out, and which files of the base are gone."""
    found, budget = Found(job), [job["entries"]]
    for full, info in walk(job["root"], budget):
        found.take(full, os.path.relpath(full, job["root"]), info)
        if found.full():
            break
    base: dict[str, Any] = job["base"]
    gone = [path for path in base if not os.path.lexists(os.path.join(job["root"], path))]
    return {
        "files": {} if found.full() else found.files, "left": found.suspects + found.left, "more": found.more,
        "same": sorted(found.same), "gone": gone, "size": found.size, "count": len(found.files),
        "full": budget[0] < 0,
    }  # fmt: skip


def traces(job: dict[str, Any], same: set[str]) -> dict[str, Any]:
    """Returns where the canary is, and which small files, but for `same`, name what hooks are made of."""
    until = time.monotonic() + SEARCH_S
    canary, words = job["canary"].encode(), [word.encode() for word in job["words"]]
    leaks: list[str] = []
    mentions: list[list[str]] = []
    elsewhere: list[str] = []
    if canary and any(canary.decode() in text for pair in os.environ.items() for text in pair):
        leaks.append("the environment")
    for place in job["search"]:
        for path, info in walk(place, [job["entries"]]):
            if time.monotonic() > until:
                break
            if canary and len(leaks) < HITS and has(path, canary):
                leaks.append(shown(path))
            inside = path.startswith(job["root"] + "/")
            if not inside and len(elsewhere) < HITS and any(re.search(r, path) for r in job["suspects"]):
                elsewhere.append(shown(path))
            known = inside and os.path.relpath(path, job["root"]) in same
            if known or len(mentions) >= HITS or info.st_size > SMALL:
                continue
            data = read(path, SMALL) or b""
            mentions += [[shown(path), word.decode()] for word in words if word in data]
    return {"leaks": leaks, "mentions": mentions, "elsewhere": elsewhere}


def main() -> None:
    """Reads the job, writes what it found."""
    job = json.loads(sys.stdin.buffer.read())
    found = export(job)
    sys.stdout.write(json.dumps({**found, **traces(job, set(found["same"]))}))
