"""Rows of JSONL and Parquet files by number, so that a run can go on at the very row where it stopped.

A JSONL file is read once at first, for where its lines begin and whether each is JSON; a Parquet file is read
one row group at a time; a folder saved by the `datasets` library is read through it. Rows stay where they are
until they are asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np


class DataError(ValueError):
    """Training data that cannot be used: the file, the line, what is wrong, and what to do."""


class Rows(Protocol):
    """Rows of one file by number."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def row(self, index: int) -> Mapping[str, Any]:
        """The row `index`."""
        ...

    def place(self, index: int) -> str:
        """What a person calls that row."""
        ...


def open_rows(path: str) -> Rows:
    """Opens a file of rows, by its kind.

    Raises:
        DataError: There is no such file, it is empty, of an unknown kind, or a library is missing.
    """
    file = Path(path).expanduser()
    if not file.exists():
        near = sorted(p.name for p in file.parent.glob("*.jsonl"))[:5] if file.parent.is_dir() else []
        raise DataError(f"{path}: no such file{'; there are ' + ', '.join(near) if near else ''}")
    rows = _opened(file, path)
    if not len(rows):
        raise DataError(f"{path}: holds no row; give it demonstrations, or leave it out of sft.data")
    return rows


def _opened(file: Path, path: str) -> Rows:
    if file.is_dir():
        return DatasetRows(file)
    if file.suffix in (".jsonl", ".ndjson"):
        return LineRows(file)
    if file.suffix == ".parquet":
        return ParquetRows(file)
    raise DataError(
        f"{path}: unknown kind of file; data are .jsonl, .parquet, or a folder of Dataset.save_to_disk"
    )


class LineRows:
    """One JSON object a line; blank lines are passed over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        starts, numbers, position = [], [], 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    _parsed(line, f"{path}:{number}")
                    starts.append(position)
                    numbers.append(number)
                position += len(line)
        self._starts, self._numbers = np.array(starts, np.int64), np.array(numbers, np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> Mapping[str, Any]:
        """Reads and parses one line."""
        with self._path.open("rb") as file:
            file.seek(int(self._starts[index]))
            return _parsed(file.readline(), self.place(index))

    def place(self, index: int) -> str:
        """`file:line`."""
        return f"{self._path}:{self._numbers[index]}"


def _parsed(line: bytes, place: str) -> Mapping[str, Any]:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON ({error}); one object stands on each line, in UTF-8") from error
    if not isinstance(value, dict):
        raise DataError(f"{place}: a row is an object, not a {type(value).__name__}")
    return value


class ParquetRows:
    """The rows of a Parquet file; the row group of the last one asked for is kept."""

    def __init__(self, path: Path) -> None:
        try:
            from pyarrow import ArrowException, parquet
        except ImportError as error:
            raise DataError(f"{path}: Parquet needs pyarrow: pip install 'tempering[data]'") from error
        self._path, self._broken = path, (ArrowException, OSError)
        try:
            self._file = parquet.ParquetFile(path)
        except self._broken as error:
            raise DataError(f"{path}: not a Parquet file ({error}); write it anew") from error
        groups = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
        self._ends = np.cumsum(groups)
        self._loaded: tuple[int, Sequence[Mapping[str, Any]]] = (-1, [])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def row(self, index: int) -> Mapping[str, Any]:
        """One row; its group is read unless it was the last one read."""
        group = int(np.searchsorted(self._ends, index, side="right"))
        if self._loaded[0] != group:
            try:
                self._loaded = (group, self._file.read_row_group(group).to_pylist())
            except self._broken as error:
                raise DataError(
                    f"{self.place(index)}: cannot be read ({error}); write the file anew"
                ) from error
        first = int(self._ends[group - 1]) if group else 0
        return _without_nulls(self._loaded[1][index - first])

    def place(self, index: int) -> str:
        """`file, row n`, counted from 1."""
        return f"{self._path}, row {index + 1}"


class DatasetRows:
    """A dataset that `datasets.Dataset.save_to_disk` wrote."""

    def __init__(self, path: Path) -> None:
        try:
            import datasets  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise DataError(
                f"{path}: a folder is read by the datasets library: pip install datasets, or export the data "
                "with Dataset.to_json(lines=True) or to_parquet"
            ) from error
        self._path = path
        try:
            self._data = datasets.load_from_disk(str(path))
        except (FileNotFoundError, ValueError) as error:
            raise DataError(f"{path}: no dataset ({error}); save it with Dataset.save_to_disk") from error
        if not isinstance(self._data, datasets.Dataset):
            raise DataError(f"{path}: holds several splits; give the folder of one of them")

    def __len__(self) -> int:
        return len(self._data)

    def row(self, index: int) -> Mapping[str, Any]:
        """One row."""
        return _without_nulls(self._data[index])

    def place(self, index: int) -> str:
        """`folder, row n`, counted from 1."""
        return f"{self._path}, row {index + 1}"


def _without_nulls(value: Any) -> Any:
    """Columns give every row the keys of all; those a row did not have are null, and go."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
