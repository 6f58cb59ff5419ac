"""Does the policy compute what the published reference computes?

    python -m benchmarks.parity DIR [--only text]

Every file of a reference folder is discovered and checked; what has no check counts as failed. `--only text`
keeps to the text path of unquantised models and the small vectors. One line a case; the last line is `parity
P/N`, and the exit status is 1 when P < N.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.parity_data import Case, ModelFile
from benchmarks.parity_extras import check_drafter, check_images
from benchmarks.parity_layers import LayerRun, check_quantised_decode
from benchmarks.parity_model import CleanRun, check_decode
from benchmarks.parity_vectors import check_engram, check_formats, check_mhc, check_rope
from model.chat.oracle import check_cases
from model.checkpoint import CheckpointError

_VECTORS: dict[str, Callable[[dict[str, Any]], list[Case]]] = {
    "formats": check_formats,
    "mhc": check_mhc,
    "rope": check_rope,
    "engram": check_engram,
}
_COMPANIONS: dict[str, Callable[[ModelFile, str, dict[str, torch.Tensor]], list[Case]]] = {
    "dspark": check_drafter,
    "image": check_images,
}


class Folder:
    """A reference folder: which files there are, and the model that each belongs to."""

    def __init__(self, path: Path, text_only: bool) -> None:
        self.path, self.text_only = path, text_only
        self.models: dict[str, ModelFile] = {}

    def cases(self) -> Iterator[Case]:
        """Every case of the folder."""
        vectors = []
        for file in sorted(self.path.glob("*.json")):
            data = json.loads(file.read_text())
            if "text_config" in data:
                yield from self._model(file, data)
            else:
                vectors.append((file, data))
        for file, data in vectors:
            yield from self._vectors(file.stem, data)
        for file in sorted(self.path.glob("*.safetensors")):
            if not file.with_suffix(".json").exists():
                yield from self._companion(file)

    def _model(self, file: Path, data: dict[str, Any]) -> Iterator[Case]:
        clean = data.get("fixture", {}).get("mode") == "clean_fp32"
        if self.text_only and not clean:
            return
        try:
            model = self.models[file.stem] = ModelFile(file)
        except (CheckpointError, FileNotFoundError) as error:
            yield Case(f"{file.stem} weights", False, str(error))
            return
        if clean:
            yield from CleanRun.of(model).cases()
        else:
            yield from LayerRun(model).cases()

    def _vectors(self, stem: str, data: dict[str, Any]) -> Iterator[Case]:
        kind = stem.rsplit("_", 1)[-1]
        if kind in _VECTORS:
            yield from _VECTORS[kind](data)
        elif kind == "chat" and not self.text_only:
            for result in check_cases(data):
                yield Case(f"chat {result.name}", result.passed, result.detail)
        elif not self.text_only:
            yield Case(stem, False, "no check for this file")

    def _companion(self, file: Path) -> Iterator[Case]:
        kind = file.stem.rsplit("_", 1)[-1]
        prefix = file.stem.removesuffix(kind)
        if kind == "decode":
            for key, value in sorted(load_file(file).items()):
                yield from self._decode(prefix, key, value)
        elif not self.text_only:
            yield from self._clean_companion(kind, prefix, file)

    def _clean_companion(self, kind: str, prefix: str, file: Path) -> Iterator[Case]:
        """The drafter and images, which use the weights of the unquantised model."""
        model = self.models.get(f"{prefix}clean_fp32")
        if kind not in _COMPANIONS or model is None:
            yield Case(file.stem, False, "no check for this file, or no model file that it belongs to")
        else:
            yield from _COMPANIONS[kind](model, file.stem, load_file(file))

    def _decode(self, prefix: str, key: str, expected: torch.Tensor) -> Iterator[Case]:
        name = key.split(".", 1)[0]
        model = self.models.get(name) or self.models.get(prefix + name)
        if model is None:
            if not self.text_only:
                yield Case(f"decode {key}", False, "no model file that it belongs to")
        elif model.clean:
            yield check_decode(model, key, expected)
        else:
            yield check_quantised_decode(model, key, expected)


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
