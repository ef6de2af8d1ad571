"""Loading a target: only the weights that its process needs, straight to where they run.

A model keeps the shape its config says: what is not loaded is an `Absent` module in its place. So
names, layer numbers and the config's own lists stay what they are, and whatever would use an absent
module fails with a line that says so instead of computing something else.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from dflash_ext.errors import UserError
from dflash_ext.transformers_api import (
    empty_model,
    load_pretrained,
    loading,
    read_config,
    read_tokenizer,
    round_decoded,
    stored_in_fp8,
)

log = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
_NAMED = 3
"""Tensors that a message names; of the others it gives the number."""


Runs = Literal["nothing", "taps", "layers", "logits"]


@dataclass(frozen=True)
class Needs:
    """What a process does with a target, and so what is loaded beside its embedding."""

    runs: Runs = "logits"
    """How far a forward gets: to the last tap, through the last decoder layer, to the end."""
    head: bool = True
    """Is the head read? It is loaded for logits in any case."""
    last_layers: int = 0
    """Layers whose weights are read, though they may not run."""

    def layers(self, num_layers: int, tap_ids: Sequence[int]) -> frozenset[int]:
        """Numbers of the decoder layers to load."""
        ends = {"nothing": 0, "taps": max(tap_ids) + 1}
        first_out = max(0, num_layers - self.last_layers)
        return frozenset((*range(ends.get(self.runs, num_layers)), *range(first_out, num_layers)))

    @property
    def loads_head(self) -> bool:
        return self.head or self.runs == "logits"


WHOLE = Needs()


class Absent(nn.Module):
    """Stands where a decoder layer or the head was not loaded."""

    def __init__(self, what: str, original: nn.Module) -> None:
        super().__init__()
        self.what = what
        self.shapes = {name: tuple(p.shape) for name, p in original.named_parameters()}
        """Of the parameters that are not here."""
        # A model's forward may read what kind of layer this is before it calls it.
        for name, value in vars(original).items():
            if not name.startswith("_") and isinstance(value, (str, int, float, bool)):
                setattr(self, name, value)

    def refuse(self) -> NoReturn:
        raise UserError(
            f"{self.what} of the target is not loaded: this process loaded only what its part of "
            "the run needs; load the whole target for this"
        )

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        self.refuse()


def parameter_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name -> shape of all parameters, also of those that are not loaded."""
    found = {name: tuple(p.shape) for name, p in module.named_parameters()}
    for prefix, part in module.named_modules():
        if isinstance(part, Absent):
            dot = f"{prefix}." if prefix else ""
            found |= {f"{dot}{name}": shape for name, shape in part.shapes.items()}
    return found


def values_loaded(model: nn.Module, num_layers: int, tap_ids: Sequence[int], needs: Needs) -> int:
    """How many weights a process with such needs loads; `model`: what another one loaded of it."""

    def count(module: nn.Module) -> int:
        return sum(math.prod(shape) for shape in parameter_shapes(module).values())

    kept = needs.layers(num_layers, tap_ids)
    layers = enumerate(decoder_layers(model, num_layers))
    found = count(model) - sum(count(layer) for i, layer in layers if i not in kept)
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    tied = not isinstance(head, Absent) and head.weight is embedding.weight
    return found if tied or needs.loads_head else found - count(head)


def decoder_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """The text decoder's layer list.

    It is the ModuleList of `num_layers` entries whose parent also holds the input embedding:
    that rule finds the text model inside multimodal wrappers, whose vision tower may be as deep.
    """
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    found: list[tuple[int, nn.ModuleList]] = []
    for name, parent in model.named_modules():
        if any(m is embedding for m in parent.modules()):
            depth = name.count(".") + bool(name)
            lists = [c for c in parent.children() if isinstance(c, nn.ModuleList)]
            found += [(depth, c) for c in lists if len(c) == num_layers]
    if not found:
        raise UserError(
            f"{type(model).__name__}: no list of {num_layers} decoder layers beside the input "
            "embedding; expected a decoder-only causal LM"
        )
    return max(found, key=lambda pair: pair[0])[1]


@dataclass(frozen=True)
class Shape:
    """Where a causal LM has what, by the names of its modules."""

    kind: type[Any]
    """Its class."""
    config: Any
    num_layers: int
    embedding: str
    layers: str
    head: str | None
    """None: it is the embedding's own matrix, or there is none."""
    outside: tuple[str, ...]
    """Modules that together hold everything but the decoder layers."""

    @classmethod
    def read(cls, path: str, *, trust_remote_code: bool) -> Shape:
        """Of a directory or hub id, by its config. UserError if it is no causal LM."""
        model = empty_model(path, trust_remote_code=trust_remote_code)
        num_layers = model.config.get_text_config().num_hidden_layers
        layers = decoder_layers(model, num_layers)
        names = {module: name for name, module in model.named_modules()}
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        own_head = head is not None and head.weight is not embedding.weight
        return cls(
            type(model),
            model.config,
            num_layers,
            names[embedding],
            names[layers],
            names[head] if own_head else None,
            tuple(_outside(model, layers)),
        )

    def absent(self, needs: Needs, tap_ids: Sequence[int]) -> dict[str, str]:
        """Name of each module that is not needed -> what it is."""
        kept = needs.layers(self.num_layers, tap_ids)
        gone = {
            f"{self.layers}.{i}": f"decoder layer {i}"
            for i in range(self.num_layers)
            if i not in kept
        }
        if self.head is not None and not needs.loads_head:
            gone[self.head] = "the head"
        return gone

    def device_map(self, devices: Sequence[torch.device]) -> dict[str, torch.device]:
        """Decoder layers in order and evenly over the devices, all else on the first one.

        So what goes in, and logits that come out, are on the first device.
        """
        if len(devices) == 1:
            return {"": devices[0]}
        found = dict.fromkeys(self.outside, devices[0])
        for i in range(self.num_layers):
            found[f"{self.layers}.{i}"] = devices[i * len(devices) // self.num_layers]
        return found


def _outside(model: nn.Module, layers: nn.Module, prefix: str = "") -> Iterator[str]:
    for name, child in model.named_children():
        if layers not in child.modules():
            yield prefix + name
        elif child is not layers:
            yield from _outside(child, layers, f"{prefix}{name}.")


def unneeded_tensors(
    names: Sequence[str], shape: Shape, absent: Sequence[str]
) -> Callable[[str], bool]:
    """Does a tensor of a checkpoint with these `names` surely belong to an absent module?

    A checkpoint may call the text model otherwise than the model does, but in both its layers lie
    beside its embedding; so a vision tower's layers are never taken for them.
    """
    table = f"{shape.embedding.rpartition('.')[2]}.weight"
    beside = shape.layers.rpartition(".")[2]
    starts = [f"{name}." for name in absent if name == shape.head]
    starts += [
        f"{name.removesuffix(table)}{beside}.{layer.rpartition('.')[2]}."
        for name in names
        if name == table or name.endswith(f".{table}")
        for layer in absent
        if layer != shape.head
    ]
    return lambda name: name.startswith(tuple(starts))


@contextmanager
def needed_files(path: str, shape: Shape, absent: Sequence[str]) -> Iterator[str]:
    """A directory of only those of a checkpoint's shards that hold a tensor of the others.

    `path` itself where there is nothing to leave out: of a single file only what is needed is read.
    Of a hub's checkpoint only the needed shards are fetched. UserError if one is missing.
    """
    folder = _local_folder(path)
    if not absent or not (folder / INDEX).is_file() or (folder / WEIGHTS).is_file():
        yield path
        return
    try:
        index = json.loads((folder / INDEX).read_text())
        places = {str(name): str(file) for name, file in index["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / INDEX} is damaged ({error}): fetch it again") from None
    unneeded = unneeded_tensors(list(places), shape, absent)
    places = {name: file for name, file in places.items() if not unneeded(name)}
    _fetch(path, folder, sorted(set(places.values())))
    with tempfile.TemporaryDirectory(prefix="dflash-target-") as scratch:
        for file in [*folder.glob("*.json"), *(folder / name for name in set(places.values()))]:
            if not file.is_file():
                raise UserError(
                    f"target {path!r}: {file.name}, which its index names, is missing: fetch it"
                )
            if file.name != INDEX:
                (Path(scratch) / file.name).symlink_to(file.resolve())
        said = {"metadata": {}, **index, "weight_map": places}  # transformers wants the former
        (Path(scratch) / INDEX).write_text(json.dumps(said))
        yield scratch


def _local_folder(path: str) -> Path:
    """The directory itself, or the one that a hub id's small files are fetched to."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    with loading(path):
        return Path(snapshot_download(path, allow_patterns=["*.json"]))


def _fetch(path: str, folder: Path, files: Sequence[str]) -> None:
    if folder != Path(path):
        from huggingface_hub import snapshot_download

        with loading(path):
            snapshot_download(path, revision=folder.name, allow_patterns=list(files))


def load_weights(
    path: str,
    dtype: torch.dtype,
    devices: Sequence[torch.device],
    *,
    needs: Needs = WHOLE,
    taps: Callable[[int], Sequence[int]] = lambda _: (),
    trust_remote_code: bool = False,
) -> Any:
    """The causal LM of a directory or hub id, each weight read straight to its device.

    taps: the tapped layers of a target of so many. UserError if it cannot be loaded or a needed
    tensor is missing or of another shape.
    """
    keywords = {
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # check_loaded names them
    }
    absent: dict[str, str] = {}
    if needs == WHOLE and len(devices) == 1:
        config = read_config(path, trust_remote_code=trust_remote_code)
        in_fp8 = stored_in_fp8(config)
        places = {"": devices[0]}
        model, found = load_pretrained(path, config=config, device_map=places, **keywords)
    else:
        shape = Shape.read(path, trust_remote_code=trust_remote_code)
        in_fp8 = stored_in_fp8(shape.config)
        if needs != WHOLE:
            absent = shape.absent(needs, taps(shape.num_layers))
        places = shape.device_map(devices)
        with needed_files(path, shape, list(absent)) as folder, loading(path):
            model, found = without(shape.kind, absent).from_pretrained(
                folder, config=shape.config, device_map=places, **keywords
            )
        model.__class__ = shape.kind
        model.name_or_path = model.config.name_or_path = path
    prefixes = tuple(f"{name}." for name in absent)
    check_loaded(path, found, lambda name: name.startswith(prefixes))
    if in_fp8:
        round_decoded(model, dtype)
    return model


@torch.no_grad()
def draw_weights(
    path: str,
    dtype: torch.dtype,
    devices: Sequence[torch.device],
    *,
    needs: Needs = WHOLE,
    taps: Callable[[int], Sequence[int]] = lambda _: (),
    trust_remote_code: bool = False,
) -> Any:
    """`load_weights` without a checkpoint: what the config describes, with random weights.

    Every weight is drawn by its name, so it is the same in every process with such a device,
    whatever else that process needs.
    """
    shape = Shape.read(path, trust_remote_code=trust_remote_code)
    absent = shape.absent(needs, taps(shape.num_layers))
    with loading(path):
        model = without(shape.kind, absent).from_pretrained(
            None,
            config=shape.config,
            state_dict={},
            dtype=dtype,
            device_map=shape.device_map(devices),
        )
    model.__class__ = shape.kind
    spread = getattr(shape.config.get_text_config(), "initializer_range", 0.02)
    for name, weight in model.named_parameters():
        own = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
        if weight.dim() > 1:
            weight.normal_(std=spread, generator=own)
        elif bool((weight != weight[0]).any()):  # a vector that is no constant was drawn, too
            weight.uniform_(generator=own)
    return model


def without(kind: type[Any], absent: Mapping[str, str]) -> type[Any]:
    """The class of a model that begins with `Absent` in place of the modules named."""

    def begin(self: Any, *args: Any, **keywords: Any) -> None:
        kind.__init__(self, *args, **keywords)
        for name, what in absent.items():
            parent, _, own = name.rpartition(".")
            setattr(self.get_submodule(parent), own, Absent(what, self.get_submodule(name)))

    # transformers looks at name and module of a class.
    return type(kind.__name__, (kind,), {"__init__": begin, "__module__": kind.__module__})


def check_loaded(path: str, found: Mapping[str, Any], absent: Callable[[str], bool]) -> None:
    """UserError for a weight that its checkpoint lacks or has in another shape.

    found: transformers' loading info. Tensors that no module took are a warning, unless `absent`.
    """
    if missing := sorted(found["missing_keys"]):
        raise UserError(
            f"target {path!r}: its checkpoint lacks {_some(missing)}, which would begin at random: "
            "expected every weight of its config.json"
        )
    other = [f"{n} ({list(a)}, expected {list(b)})" for n, a, b in sorted(found["mismatched_keys"])]
    if other:
        raise UserError(
            f"target {path!r} cannot be loaded: its checkpoint has other shapes than its "
            f"config.json says: {_some(other)}"
        )
    if unused := sorted(name for name in found["unexpected_keys"] if not absent(name)):
        log.warning("target %s: no use for %s of its checkpoint", path, _some(unused))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def load_tokenizer(path: str, trust_remote_code: bool) -> Any:
    """The tokenizer beside a model, or None if there is none."""
    try:
        return read_tokenizer(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # a broken file raises whatever its reader trips over
        log.warning("target %s: its tokenizer cannot be loaded: %s", path, error)
        return None
