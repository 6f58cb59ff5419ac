"""Does the policy compute what the published reference computes?

    python -m benchmarks.parity DIR [--only text]

Every file of a reference folder is discovered by its content and checked; what has no check, or cannot be
read, counts as failed. A further file belongs to the model with its prefix (`a_dspark` to `a_clean_fp32`), or
to the only unquantised one. `--only text` keeps to the text path of unquantised models and the small vectors.
One line a case; the last line is `parity P/N`, and the exit status is 1 when P < N.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.parity_data import CLEAN, DECODE_KEY, Case, ModelFile, guarded, mode_of
from benchmarks.parity_extras import check_drafter, check_images
from benchmarks.parity_layers import LIMITS, LayerRun, check_quantised_decode
from benchmarks.parity_model import CleanRun, check_decode
from benchmarks.parity_vectors import FORMATS, check_engram, check_formats, check_mhc, check_rope
from model.chat.oracle import check_cases

_VECTORS: dict[str, tuple[set[str], Callable[[dict[str, Any]], Iterable[Case]]]] = {
    "formats": (set(FORMATS), check_formats),
    "mhc": ({"coefficients", "site_update"}, check_mhc),
    "rope": ({"rope_dim", "tables"}, check_rope),
    "engram": ({"engram_layer_ids", "layers", "cases"}, check_engram),
}
"""Small vectors: the keys they are known by (for formats: any of them), and their check."""
_CHAT = {"templates", "special", "prompts", "completions"}
_COMPANIONS: dict[str, tuple[str, Callable[[ModelFile, str, dict[str, Tensor]], Iterable[Case]]]] = {
    "dspark": (r"in\.prefill_main_hidden$", check_drafter),
    "image": (r"in\.image\d+\.patches$", check_images),
}
"""Further results of an unquantised model: the key they are known by, and their check."""


class Folder:
    """A reference folder: which files there are, and the model that each belongs to."""

    def __init__(self, path: Path, text_only: bool) -> None:
        self.path, self.text_only = path, text_only
        self.models: dict[str, ModelFile] = {}

    def cases(self) -> Iterator[Case]:
        """Every case of the folder."""
        vectors, configured = [], set()
        for file in sorted(self.path.glob("*.json")):
            data = _read(file)
            if isinstance(data, Case):
                yield data
            elif "text_config" in data:
                configured.add(file.stem)
                yield from guarded(file.stem, partial(self._model, file, data))
            else:
                vectors.append((file, data))
        for file, data in vectors:
            yield from guarded(file.stem, partial(self._vectors, file.stem, data))
        for file in sorted(self.path.glob("*.safetensors")):
            if file.stem not in configured:
                yield from guarded(file.stem, partial(self._companion, file))

    def _model(self, file: Path, data: dict[str, Any]) -> Iterator[Case]:
        mode = mode_of(data)
        if self.text_only and mode != CLEAN:
            return
        if mode != CLEAN and mode not in LIMITS:
            yield Case(file.stem, False, f"no check for mode {mode!r}")
            return
        model = self.models[file.stem] = ModelFile(file)
        cases = CleanRun.of(model).cases() if model.clean else LayerRun(model).cases()
        yield from cases
        yield from model.unknown()
        if not cases:
            yield Case(file.stem, False, "the file has no results to compare with")

    def _vectors(self, stem: str, data: dict[str, Any]) -> Iterator[Case]:
        for kind, (keys, check) in _VECTORS.items():
            if keys & data.keys() if kind == "formats" else keys <= data.keys():
                yield from check(data)
                return
        if data.keys() >= _CHAT:
            for result in () if self.text_only else check_cases(data):
                yield Case(f"chat {result.name}", result.passed, result.detail)
        elif not self.text_only:
            yield Case(stem, False, "no check for this file")

    def _companion(self, file: Path) -> Iterator[Case]:
        data = load_file(file)
        if any(DECODE_KEY.search(key) for key in data):
            for key, value in sorted(data.items()):
                yield from guarded(f"decode {key}", partial(self._decode, file.stem, key, value))
        elif not self.text_only:
            yield from self._clean_companion(file.stem, data)

    def _clean_companion(self, stem: str, data: dict[str, Tensor]) -> Iterator[Case]:
        """The drafter and images, which use the weights of the unquantised model."""
        for kind, (known_by, check) in _COMPANIONS.items():
            if any(re.match(known_by, key) for key in data):
                model = self._clean_model(stem.removesuffix(kind))
                if model is None:
                    yield Case(stem, False, "no unquantised model file that it belongs to")
                else:
                    yield from check(model, stem, data)
                return
        yield Case(stem, False, "no check for this file")

    def _clean_model(self, prefix: str) -> ModelFile | None:
        """The unquantised model of `prefix`, or the only one there is."""
        clean = [model for model in self.models.values() if model.clean]
        same = [model for model in clean if model.prefix == prefix]
        return (same or (clean if len(clean) == 1 else [None]))[0]

    def _decode(self, stem: str, key: str, expected: Tensor) -> Iterator[Case]:
        name = key.split(".", 1)[0]
        model = self.models.get(name) or self.models.get(stem.removesuffix("decode") + name)
        if model is None:
            if not self.text_only:
                yield Case(f"decode {key}", False, "no model file that it belongs to")
        elif model.clean:
            yield check_decode(model, key, expected)
        else:
            yield check_quantised_decode(model, key, expected)


def _read(file: Path) -> dict[str, Any] | Case:
    """The content of a JSON file, or the case that it fails."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return Case(file.stem, False, f"{file.name} cannot be read: {error}")
    return data if isinstance(data, dict) else Case(file.stem, False, "no check for this file")


def main() -> int:
    """Check a folder and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=["text"], help="restrict to a part of the checks")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    if not arguments.folder.is_dir():
        parser.error(f"{arguments.folder} is not a folder: pass the folder with the reference files")
    passed = total = 0
    for case in Folder(arguments.folder, arguments.only == "text").cases():
        print(f"{'pass' if case.passed else 'FAIL'} {case.name}: {case.detail}", flush=True)
        passed, total = passed + case.passed, total + 1
    print(f"parity {passed}/{total}")
    return 0 if total and passed == total else 1


if __name__ == "__main__":
    sys.exit(main())
