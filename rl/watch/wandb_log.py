"""Weights & Biases: the numbers of metrics.jsonl, each family on its own axis, and never a reason to stop.

Without a key the run is written to disk (`wandb sync` uploads it later). Whatever fails here is told once;
the training goes on without it.
"""

from __future__ import annotations

import netrc
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from rl.watch.jsonl import Row
from rl.watch.metrics import FAMILIES

START_S = 20.0
FINISH_S = 20.0
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbSettings:
    """Where the numbers go: `mode` is auto, online, offline or disabled; `run_id` is kept over resumes."""

    mode: str
    project: str
    name: str
    run_id: str
    folder: Path


def choose_mode(mode: str) -> str:
    """Returns online, offline or disabled; `auto` is online when there is a key, and obeys WANDB_MODE."""
    if mode != "auto":
        return mode
    if (wish := os.environ.get("WANDB_MODE", "")) in ("online", "offline", "disabled"):
        return wish
    return "online" if has_key() else "offline"


def has_key() -> bool:
    """Whether W&B would find a key: in the environment, or in ~/.netrc for the server's host."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class WandbLog:
    """One W&B run. After a failure it does nothing more; `mode` says what it really does."""

    def __init__(self, settings: WandbSettings, config: Mapping[str, Any], tell: Tell) -> None:
        self._tell = tell
        self._run: Any = None
        self.mode = choose_mode(settings.mode)
        if self.mode == "online" and not self._start("online", settings, config):
            _forget()
            self._tell("W&B: writing offline instead; `wandb sync` uploads the folder later")
            self.mode = "offline"
        if self.mode == "offline" and self._run is None and not self._start("offline", settings, config):
            self.mode = "disabled"

    def write(self, row: Row) -> None:
        """Logs one row; its step is a metric of its own, so no row is dropped for coming late."""
        if self._run is None:
            return
        try:
            self._run.log({**row.metrics, f"{row.family}/step": row.step})
        except Exception as error:
            self._fail("logging", error)

    def plot(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], picture: Path) -> None:
        """Logs a cost-quality curve: a table, score over tokens as a plot, and the drawn picture."""
        if self._run is None:
            return
        try:
            import wandb

            data = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
            line = wandb.plot.line(data, "tokens", "score", title="Quality against cost")
            self._run.log(
                {f"{name}/table": data, f"{name}/plot": line, f"{name}/picture": wandb.Image(picture)}
            )
        except Exception as error:
            self._fail("logging a curve", error)

    def alert(self, title: str, text: str) -> None:
        """Raises an alert on the server."""
        if self._run is None:
            return
        try:
            self._run.alert(title=title, text=text)
        except Exception as error:
            self._fail("an alert", error)

    def close(self, exit_code: int) -> None:
        """Ends the run; gives up on a server that does not answer in time (the local copy stays)."""
        run, self._run = self._run, None
        if run is None:
            return
        failures: list[BaseException] = []

        def finish() -> None:
            try:
                run.finish(exit_code=exit_code)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=finish, name="wandb-finish", daemon=True)
        thread.start()
        thread.join(FINISH_S)
        if thread.is_alive():
            self._tell(
                f"W&B: the server took more than {FINISH_S:g} s at the end; `wandb sync` uploads the rest"
            )
            _abandon()
        elif failures:
            self._tell(f"W&B: the end failed ({_reason(failures[0])}); `wandb sync` uploads the rest")

    def _start(self, mode: str, settings: WandbSettings, config: Mapping[str, Any]) -> bool:
        try:
            self._run = _init(mode, settings, config)
        except Exception as error:
            self._tell(f"W&B: starting {mode} failed ({_reason(error)})")
            return False
        return True

    def _fail(self, what: str, error: Exception) -> None:
        self._run = None
        self.mode = "disabled"
        self._tell(f"W&B: {what} failed ({_reason(error)}); the numbers go on in metrics.jsonl only")


def _init(mode: str, settings: WandbSettings, config: Mapping[str, Any]) -> Any:
    import wandb

    settings.folder.mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        mode="online" if mode == "online" else "offline",
        project=settings.project,
        name=settings.name,
        id=settings.run_id,
        resume="allow" if mode == "online" else None,
        dir=str(settings.folder),
        config=dict(config),
        settings=wandb.Settings(
            init_timeout=START_S,
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_meta=True,
        ),
    )
    for family in FAMILIES:
        run.define_metric(f"{family}/step", hidden=True)
        run.define_metric(f"{family}/*", step_metric=f"{family}/step")
    return run


def _forget() -> None:
    """Ends the helper process of W&B, which still holds the id of the run that did not start."""
    import wandb

    wandb.teardown(exit_code=0)


def _abandon() -> None:
    """Ends the helper process of W&B without waiting for uploads."""
    import wandb

    threading.Thread(target=wandb.teardown, kwargs={"exit_code": 0}, daemon=True).start()


def _reason(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
