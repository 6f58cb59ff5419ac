"""The prefix store of an engine: made from settings, tidied away at its end, counted in statistics."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from model.cache.page_keys import Fingerprint
from model.cache.prefix import PrefixStore, PrefixTiers
from model.chat import ChatFormat
from model.engine.policy import Policy
from model.replay import Replay
from rl.leftovers import start_ticks

Tier = Literal["off", "memory", "disk"]
MEMORY = Path("/dev/shm")
_PREFIX = "temper-prefix"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSizes:
    """How much a prefix store keeps, where and how long.

    Attributes:
        memory_mb: most megabytes of compressed keys in memory.
        memory_folder: on a tmpfs, shared by all engines that name it; empty: one of the process's own in
            /dev/shm, which goes with it.
        disk_mb: most megabytes on disk.
        disk_folder: shared likewise; empty: `prefixes` in the folder of the run.
        page_ttl_s: seconds after its last use at which a page of keys expires.
        window_share: most of the machine's memory that windows of sessions may take.
        window_ttl_s: seconds after its last use at which a session's windows expire.
    """

    memory_mb: int = 1024
    memory_folder: str = ""
    disk_mb: int = 8192
    disk_folder: str = ""
    page_ttl_s: float = 72 * 3600.0
    window_share: float = 0.1
    window_ttl_s: float = 600.0

    def __post_init__(self) -> None:
        if min(self.memory_mb, self.disk_mb) < 1 or min(self.page_ttl_s, self.window_ttl_s) <= 0:
            raise ValueError(
                f"a prefix store needs room and time: memory_mb={self.memory_mb}, disk_mb={self.disk_mb}, "
                f"page_ttl_s={self.page_ttl_s:g}, window_ttl_s={self.window_ttl_s:g} are all above 0; "
                "engine.prefix_store=off does without"
            )
        if not 0 < self.window_share < 1:
            raise ValueError(f"window_share is a share of memory between 0 and 1, not {self.window_share:g}")


@contextmanager
def open_prefixes(
    tier: Tier,
    sizes: PrefixSizes,
    policy: Policy,
    chat: ChatFormat,
    *,
    replay: Replay,
    folder: Path,
    model: str = "",
    version: int = 0,
) -> Iterator[PrefixStore | None]:
    """Opens the store of one engine; None when it is off.

    Args:
        tier: The last tier that is used.
        sizes: How much, where and how long.
        policy: The engine's policy, already set to round or not, and to be exact or not.
        chat: Its chat format, whose tokenizer decides what an id means.
        replay: The engine's.
        folder: Of the run, for what the sizes do not place.
        model: Names the weights, unique to a checkpoint. Empty: they are this process's alone, for a version
            that is trained anew after a restart has other weights.
        version: Of the weights.

    Raises:
        ValueError: A memory folder that is not in memory.
    """
    if tier == "off":
        yield None
        return
    own = MEMORY / f"{_PREFIX}-{os.getpid()}-{start_ticks(os.getpid())}-{secrets.token_hex(4)}"
    if not sizes.memory_folder:
        _remove_leftovers()
    on_disk = tier == "disk"
    tiers = PrefixTiers(
        host_folder=Path(sizes.memory_folder) if sizes.memory_folder else own,
        host_bytes=sizes.memory_mb << 20,
        disk_folder=(Path(sizes.disk_folder) if sizes.disk_folder else folder / "prefixes")
        if on_disk
        else None,
        disk_bytes=sizes.disk_mb << 20 if on_disk else 0,
        page_ttl_s=sizes.page_ttl_s,
        window_share=sizes.window_share,
        window_ttl_s=sizes.window_ttl_s,
    )
    fingerprint = Fingerprint.of(
        policy.config,
        model=model or f"{folder.resolve()} {own.name}",
        version=version,
        tokenizer=_wording(chat),
        numerics={"replay": replay, "exact": bool(policy.exact), "fake_quant": bool(policy.fake_quant)},
    )
    try:
        yield PrefixStore(fingerprint, tiers, config=policy.config, replay=replay)
    finally:
        shutil.rmtree(own, ignore_errors=True)


def store_stats(store: PrefixStore) -> dict[str, float]:
    """What became of lookups since start, and the bytes of the tiers now."""
    stats = store.stats()
    sizes = {"memory": stats.host, "windows": stats.windows} | ({"disk": stats.disk} if stats.disk else {})
    usage = {f"prefix_{name}": float(value) for name, value in asdict(stats.usage).items()}
    return usage | {f"prefix_{name}_bytes": float(tier.nbytes) for name, tier in sizes.items()}


def _wording(chat: ChatFormat) -> str:
    return hashlib.sha256(json.dumps(chat.to_dict(), sort_keys=True).encode()).hexdigest()[:16] + (
        chat.tokenizer.digest()
    )


def _remove_leftovers() -> None:
    """Removes memory folders whose process is gone."""
    for path in MEMORY.glob(f"{_PREFIX}-*"):
        pid, ticks = path.name.removeprefix(f"{_PREFIX}-").split("-")[:2]
        try:
            gone = start_ticks(int(pid)) != int(ticks)
        except (FileNotFoundError, ProcessLookupError):
            gone = True
        if gone:
            shutil.rmtree(path, ignore_errors=True)  # another user's stays
