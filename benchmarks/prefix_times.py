"""How long the nano policy takes to go on with a history: computed anew, or loaded from a tier."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from model.cache.page_keys import Fingerprint
from model.cache.policy_cache import PolicyCache
from model.cache.prefix import PrefixStore, PrefixTiers
from model.config import PolicyConfig
from model.engine.engine import Engine
from model.engine.requests import Request
from model.engine.sampler import SamplingParams
from model.policy import Policy

LENGTH, _NEW, _REPEATS = 4096, 16, 5


@dataclass(frozen=True, slots=True)
class Times:
    """Medians in seconds, from the request to the hidden state of its last token."""

    computed: float
    loaded: dict[str, float]


class _Machine:
    """A policy, a cache and a store whose tiers can be emptied."""

    def __init__(self, host_folder: Path, disk_folder: Path) -> None:
        config = PolicyConfig.preset("nano")
        self.policy = Policy(config)
        self.policy.fake_quant = True
        self.window = config.sliding_window
        self.config, self.host, self.ids = (
            config,
            host_folder,
            random.Random(0).choices(range(64), k=LENGTH + _NEW),
        )
        tiers = PrefixTiers(
            host_folder=host_folder, host_bytes=1 << 26, disk_folder=disk_folder, disk_bytes=1 << 26
        )
        fingerprint = Fingerprint.of(config, model="times", version=0, tokenizer="times", numerics={})
        self.store = PrefixStore(fingerprint, tiers, config=config, replay="bounded")
        self.cache = self.new_cache()

    def new_cache(self) -> PolicyCache:
        """An empty cache: nothing is left on the accelerator."""
        return self.policy.new_cache(2, LENGTH + _NEW, storage="packed")

    def compute(self, slot: int, begin: int, end: int, decode_from: int) -> None:
        """Run tokens of the history, the decoder on the last window of them."""
        self.policy.extend(
            self.cache,
            torch.tensor([slot]),
            torch.tensor([self.ids[begin:end]]),
            torch.tensor([end - begin]),
            decode_from=torch.tensor([decode_from]),
        )

    def computed(self) -> int:
        """Compute everything."""
        slot = self.cache.allocate()
        self.compute(slot, 0, len(self.ids), len(self.ids) - self.window)
        return slot

    def loaded(self) -> int:
        """Load what there is and compute the rest."""
        hit = self.store.lookup(self.ids, cache=self.cache)
        loaded = self.store.load(self.cache, hit, self.look_back)
        assert loaded is not None and loaded.global_tokens == LENGTH
        begin = LENGTH - loaded.replay
        decode_from = LENGTH if not loaded.replay else len(self.ids) - self.window
        self.compute(loaded.slot, begin, len(self.ids), decode_from)
        return loaded.slot

    def look_back(self, resume: int) -> torch.Tensor:
        """Ids before `resume` as n-grams see them."""
        return self.policy.look_back_ids(torch.tensor(self.ids[:resume]))

    def seconds(self, run: Callable[[], int], empty: Callable[[], None]) -> float:
        """Median time of `run`, after `empty`."""
        times = []
        for _ in range(_REPEATS):
            empty()
            begin = time.perf_counter()
            slot = run()
            times.append(time.perf_counter() - begin)
            self.cache.free(slot)
        return statistics.median(times)

    def forget(self, *, pages: bool, windows: bool) -> None:
        """Empty the accelerator, and parts of host memory."""
        self.cache = self.new_cache()
        for part, wanted in (("pages", pages), ("windows", windows)):
            for path in self.host.glob(f"{part}/v1/*/*/*/*") if wanted else ():
                path.unlink()

    def keep(self) -> None:
        """Compute the history once and save it."""
        slot = self.cache.allocate()
        self.compute(slot, 0, LENGTH, LENGTH - self.window)
        self.store.save(self.cache, slot, self.ids[:LENGTH])
        self.cache.free(slot)


def measure_times(host_folder: Path, disk_folder: Path) -> Times:
    """Compute and load a history in one run, on one thread."""
    machine = _Machine(host_folder, disk_folder)
    with torch.inference_mode():
        machine.keep()
        loaded = {
            "keys accelerator, windows": machine.seconds(machine.loaded, lambda: None),
            "keys host, windows": machine.seconds(
                machine.loaded, lambda: machine.forget(pages=False, windows=False)
            ),
            "keys disk, windows": machine.seconds(
                machine.loaded, lambda: machine.forget(pages=True, windows=False)
            ),
            "keys host, windows lost": machine.seconds(
                machine.loaded, lambda: machine.forget(pages=False, windows=True)
            ),
            "keys disk, windows lost": machine.seconds(
                machine.loaded, lambda: machine.forget(pages=True, windows=True)
            ),
        }
        computed = machine.seconds(machine.computed, lambda: machine.forget(pages=False, windows=False))
    return Times(computed, loaded)


def measure_engine(host_folder: Path, length: int = 2048) -> tuple[float, float]:
    """Median seconds to a first token after `length` tokens, in an engine that computes or finds them.

    The finding engine meets them for the first time too: another one left keys and windows in host memory.
    """
    config = PolicyConfig.preset("nano")
    policy = Policy(config)
    policy.fake_quant = True
    tiers = PrefixTiers(host_folder=host_folder, host_bytes=1 << 26)
    fingerprint = Fingerprint.of(config, model="times", version=0, tokenizer="times", numerics={})
    sampling = SamplingParams(max_tokens=1, stop_ids=frozenset())
    seconds: tuple[list[float], list[float]] = ([], [])
    for repeat in range(_REPEATS):
        ids = random.Random(repeat).choices(range(64), k=length)
        for times in seconds:
            store = PrefixStore(fingerprint, tiers, config=config, replay="bounded")
            engine = Engine(policy, max_requests=1, max_tokens=length + 32, prefix_store=store)
            begin = time.perf_counter()
            engine.submit(Request("session", ids, sampling))
            while engine.has_work:
                engine.step()
            times.append(time.perf_counter() - begin)
            ids = [*ids, *ids[:_NEW]]
    cold, hit = map(statistics.median, seconds)
    return cold, hit
