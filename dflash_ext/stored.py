"""The tensors of a drafter's directory: one safetensors file, or the shards its index names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_ext.errors import UserError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. UserError if there is none."""
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file}: cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: expected a JSON object")
    return content


def read_config_json(folder: Path) -> dict[str, Any]:
    """The content of a drafter's config.json. UserError if there is none."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is no drafter export: {CONFIG} is missing")
    return read_json(folder / CONFIG)


class StoredTensors:
    """Names, shapes and dtypes without reading the data; a tensor is read when asked for."""

    def __init__(self, folder: Path) -> None:
        """UserError if there are no readable weights in `folder`."""
        if (folder / WEIGHTS).is_file():
            files = [WEIGHTS]
        elif (folder / INDEX).is_file():
            index = read_json(folder / INDEX).get("weight_map")
            if not isinstance(index, dict):
                raise UserError(f"{folder / INDEX}: expected an object weight_map")
            files = sorted(set(map(str, index.values())))
        else:
            raise UserError(f"{folder} is no drafter export: {WEIGHTS} is missing")
        self._of: dict[str, Any] = {}
        for name in files:
            if Path(name).name != name:  # an index must not lead out of its folder
                raise UserError(f"{folder / INDEX}: {name!r} is no file of this folder")
            try:
                opened = safe_open(str(folder / name), framework="pt")
                self._of |= dict.fromkeys(opened.keys(), opened)
            except (SafetensorError, OSError) as error:
                raise UserError(f"{folder / name}: cannot be read ({error})") from error

    @property
    def names(self) -> set[str]:
        return set(self._of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._of[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """As safetensors spells it: BF16, F32, ..."""
        return str(self._of[name].get_slice(name).get_dtype())

    def get(self, name: str) -> Tensor:
        """The tensor exactly as stored, on the CPU."""
        return self._of[name].get_tensor(name)
