"""Folders as options that several commands of `temper` have."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_root(command: argparse.ArgumentParser) -> None:
    """Adds `--root`, where runs are looked for."""
    command.add_argument(
        "--root", type=Path, default=Path("runs"), help="the folder of the runs (default runs)"
    )


def add_new_folder(command: argparse.ArgumentParser) -> None:
    """Adds `--out`, which has to be given and is written."""
    command.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="the folder to write, a new one"
    )
