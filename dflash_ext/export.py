"""Drafters on disk in the layouts that serving engines load: `config.json` + safetensors.

    python -m dflash_ext.export --check DIR [--target PATH]
    python -m dflash_ext.export RUN_OR_DRAFTER --layout speculators --out DIR

Serving engines skip unknown tensor names in silence, so an export is not trusted until it has been
read back and an independent forward (export_check.py) agrees with ours (export_proof.py).
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from safetensors.torch import load_file, save_file

from dflash_ext.checkpoint import checkpoints
from dflash_ext.drafter import Drafter, DrafterConfig
from dflash_ext.errors import UserError, run_cli
from dflash_ext.export_check import StoredDrafter
from dflash_ext.export_proof import prove_forward, prove_stored
from dflash_ext.layout_reader import Reading, read_layout
from dflash_ext.layouts import Layout, TargetLabel, to_layout
from dflash_ext.pairing import TargetFacts, pairing_problems
from dflash_ext.stored import CONFIG, WEIGHTS, StoredTensors, read_config_json, read_json
from dflash_ext.target import Target, Vocabulary
from dflash_ext.tensor_rules import OWN_VOCABULARY, non_finite, tensor_flaws, tensor_problems

__all__ = ["CONFIG", "WEIGHTS", "check_pairing", "load_export", "prove", "save_export"]


def save_export(
    drafter: Drafter,
    directory: str | Path,
    *,
    target: Target | TargetLabel | None = None,
    layout: Layout = "zlab",
) -> Path:
    """Write the export, prove it, then rename it into place (an older one is replaced).

    Everything happens in a temporary folder beside `directory`, private to the user. Raises
    UserError, leaving what was there before, if the reloaded export is not the drafter or the
    layout cannot hold it. Given a loaded target, the proof is about its own logits.
    """
    label = TargetFacts.of(target).label if isinstance(target, Target) else target
    vocabulary = target.vocabulary() if isinstance(target, Target) else None
    final = Path(directory)
    final.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        new = scratch / "new"
        new.mkdir(mode=0o700)
        content = json.dumps(to_layout(drafter.config, layout, label or TargetLabel()), indent=2)
        (new / CONFIG).write_text(content + "\n")
        tensors = {
            name: parameter.detach().to("cpu", torch.bfloat16).contiguous()
            for name, parameter in drafter.named_parameters()
        }
        save_file(tensors, str(new / WEIGHTS), metadata={"format": "pt"})
        del tensors
        prove(drafter, new, vocabulary)
        if final.exists():
            os.rename(final, scratch / "old")
        os.rename(new, final)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return final


def prove(drafter: Drafter, directory: Path, vocabulary: Vocabulary | None = None) -> None:
    """UserError unless `directory` holds this drafter and is read as such independently.

    1. every parameter is stored under its name, as its own bf16 rounding, and nothing else is;
    2. the configuration is read back as it was;
    3. the reloaded drafter and the independent forward give the same logits (`prove_forward`).
    """
    stored = StoredDrafter(directory)
    prove_stored(dict(drafter.named_parameters()), stored, directory)
    reloaded = load_export(directory)
    before, after = vars(drafter.config), vars(reloaded.config)
    if odd := [name for name in before if before[name] != after[name]]:
        raise UserError(
            f"export {directory}: {odd[0]} is read back as {after[odd[0]]}, it was {before[odd[0]]}"
        )
    prove_forward(reloaded, stored, directory, vocabulary)


def examine(folder: Path) -> tuple[Reading, StoredTensors]:
    """What a drafter's directory says and holds, with all problems. UserError if it has none."""
    content, tensors = read_config_json(folder), StoredTensors(folder)
    reading = read_layout(content)
    reading.problems = [f"{CONFIG}: {problem}" for problem in reading.problems]
    reading.flaws = [f"{CONFIG}: {flaw}" for flaw in reading.flaws]
    reading.problems += tensor_problems(reading, tensors)
    reading.flaws += tensor_flaws(tensors)
    return reading, tensors


def _usable(folder: Path) -> tuple[Reading, StoredTensors]:
    """`examine`; UserError if there is any problem."""
    reading, tensors = examine(folder)
    if problems := reading.problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(
            f"{folder}: {'; '.join(problems[:3])}{more} "
            f"(all of it: python -m dflash_ext.export --check {folder})"
        )
    return reading, tensors


def read_export(directory: str | Path) -> DrafterConfig:
    """The configuration of an export of either layout, without reading its weights.

    UserError naming what is missing, unknown, of the wrong shape, or not supported.
    """
    return _usable(Path(directory))[0].config()


def load_export(directory: str | Path) -> Drafter:
    """The drafter of an export of either layout, parameters as fp32 masters on the CPU.

    UserError as `read_export`.
    """
    reading, tensors = _usable(Path(directory))
    with torch.device("meta"):
        drafter = Drafter(reading.config())
    drafter.to_empty(device="cpu")
    for name, parameter in drafter.named_parameters():
        parameter.data.copy_(tensors.get(name))
    return drafter


def check_pairing(config: DrafterConfig, target: Target) -> None:
    """UserError listing every way in which a drafter does not fit a target, in one line."""
    if wrong := pairing_problems(vars(config), TargetFacts.of(target)):
        raise UserError(f"drafter and target {target.path!r} do not pair: " + "; ".join(wrong))


def check_own_vocabulary(directory: str | Path, target: Target) -> None:
    """UserError if an export brings copies of embedding or head that are not the target's.

    Exports of the speculators layout may; training and decoding use the target's own.
    """
    tensors = StoredTensors(Path(directory))
    for name, own in zip(OWN_VOCABULARY, target.vocabulary()):
        if name in tensors.names:
            stored = tensors.get(name)[: own.shape[0]].to(torch.bfloat16)
            if not torch.equal(stored, own.to("cpu", torch.bfloat16)):
                raise UserError(
                    f"{directory}: {name} is not the target's: it was trained for another target, "
                    "or its vocabulary was trained too, which is not supported"
                )


def read_run(folder: Path, step: int | None = None) -> tuple[Drafter, str]:
    """The drafter of a run's newest checkpoint, or of the one at `step`, and the target's name.

    UserError if the run has no such checkpoint.
    """
    saved = {int(path.name[5:]): path for path in checkpoints(folder / "checkpoints")}
    chosen = max(saved, default=None) if step is None else step
    if chosen not in saved:
        have = f"it has {sorted(saved)}" if saved else "it has none"
        raise UserError(
            f"run {folder} has no checkpoint{f' of step {step}' if step else ''}: {have}"
        )
    resolved = read_json(folder / "resolved.json")
    try:
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in resolved["drafter"].items()
        }
        config, target = DrafterConfig(**fields), str(resolved["target"])
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder / 'resolved.json'} does not describe a drafter: {error}"
        ) from None
    drafter = Drafter(config)
    drafter.load_state_dict(load_file(saved[chosen] / "drafter.safetensors"))
    return drafter, target


def problems_of(folder: Path, target: TargetFacts | None) -> list[str]:
    """One line for each thing wrong with a drafter's directory; its logits are checked last."""
    try:
        reading, tensors = examine(folder)
    except UserError as error:
        return [str(error)]
    wrong = [*reading.problems, *reading.flaws, *non_finite(tensors)]
    mask, own_eos = reading.values.get("mask_token_id"), reading.label.eos_token_id
    if mask is not None and mask in (own_eos if isinstance(own_eos, list) else [own_eos]):
        wrong.append(f"{CONFIG}: mask_token_id {mask} is its own eos_token_id")
    if target is not None:
        found = pairing_problems(reading.values, target)
        wrong += [f"target {target.label.name}: {line}" for line in found]
    if wrong:
        return wrong
    try:
        prove_forward(load_export(folder), StoredDrafter(folder), folder)
    except UserError as error:
        return [str(error)]
    return []


@dataclass(frozen=True)
class Options:
    """Check a drafter, or write a run's checkpoint or another drafter in the layout you need."""

    source: Annotated[Path | None, tyro.conf.Positional] = None
    """To convert: a training run's folder, or the directory of a drafter of either layout."""
    check: Path | None = None
    """Directory of a drafter of either layout: say all that is wrong with it; exit code 0 or 1."""
    target: str | None = None
    """Directory or hub id of the target, of which config.json and tokenizer are read; none: the
    one that the run or the drafter names."""
    layout: Layout = "zlab"
    """To write: zlab (SGLang, vLLM), or speculators (vLLM, the speculators library)."""
    out: Path | None = None
    """The directory to write; a drafter in it is replaced when the new one is proven."""
    step: int | None = None
    """Of a run: the checkpoint; none: the newest."""
    trust_remote_code: bool = False
    """Let the target's repository run its own code on this machine."""


def check(options: Options, folder: Path) -> int:
    """Print what is wrong; the exit code."""
    if options.source or options.out or options.step is not None:
        raise UserError("--check only reads one directory: leave the source, --out and --step out")
    if not folder.is_dir():
        raise UserError(f"--check {folder}: no such directory")
    folder = _export_in(folder)
    target = None
    if (name := options.target or _named_target(folder)) is not None:
        target = TargetFacts.read(name, trust_remote_code=options.trust_remote_code)
    wrong = problems_of(folder, target)
    for line in wrong:
        print(line)
    against = "no target to compare with (--target)" if target is None else f"target {name}"
    if wrong:
        print(f"{folder}: {len(wrong)} problem{'s' if len(wrong) > 1 else ''}, {against}")
        return 1
    reading, _ = examine(folder)
    config = reading.config()
    print(
        f"{folder}: fine, {against}; {reading.layout} layout, {config.num_layers} layers, block "
        f"{config.block_size}, taps {list(config.target_layer_ids)}, mask token "
        f"{config.mask_token_id}; logits equal an independent forward's"
    )
    return 0


def _export_in(folder: Path) -> Path:
    """The export of a run, or of its best/, if `folder` is one; else `folder` itself."""
    inner = folder / "export"
    return inner if (inner / CONFIG).is_file() and not (folder / CONFIG).is_file() else folder


def _named_target(folder: Path) -> str | None:
    """The target that a run's resolved.json or the drafter itself names, if it is on this disk."""
    places = folder.absolute(), *folder.absolute().parents[:2]  # run, run/export, run/best/export
    files = [place / "resolved.json" for place in places]
    names: list[Any] = [read_json(file).get("target") for file in files if file.is_file()]
    if (folder / CONFIG).is_file():
        names.append(read_layout(read_config_json(folder)).label.name)
    return next((n for n in names if isinstance(n, str) and (Path(n) / CONFIG).is_file()), None)


def convert(options: Options, source: Path) -> int:
    """Write a run's or another drafter in a layout; the exit code."""
    if options.out is None:
        raise UserError("--out is missing: give the directory to write")
    if options.out.exists():  # it will be replaced as a whole
        found = {p.name for p in options.out.iterdir()} if options.out.is_dir() else {"a file"}
        if foreign := sorted(found - {CONFIG, WEIGHTS}):
            raise UserError(
                f"--out {options.out} is no drafter's directory, it holds {foreign[0]}: give a new "
                "one"
            )
    if not (source / "resolved.json").is_file():
        source = _export_in(source)
    if (source / CONFIG).is_file():
        if options.step is not None:
            raise UserError(f"--step is for a run, {source} is a drafter's directory")
        reading, _ = _usable(source)
        drafter, label = load_export(source), reading.label
    elif (source / "resolved.json").is_file():
        drafter, named = read_run(source, options.step)
        label = TargetLabel(named)
    else:
        raise UserError(
            f"{source} is neither a drafter's directory (config.json) nor a run's folder "
            "(resolved.json, checkpoints)"
        )
    if (name := options.target or _named_target(source)) is not None:
        target = TargetFacts.read(name, trust_remote_code=options.trust_remote_code)
        if wrong := pairing_problems(vars(drafter.config), target):
            raise UserError(f"drafter and target {name!r} do not pair: " + "; ".join(wrong))
        label = target.label
        drafter.config = dataclasses.replace(drafter.config, num_target_layers=target.num_layers)
    save_export(drafter, options.out, target=label, layout=options.layout)
    print(f"{options.out}: {options.layout} layout, reloaded, and equal to an independent forward")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    options = tyro.cli(Options, args=arguments, prog="python -m dflash_ext.export")
    if options.check is not None:
        return check(options, options.check)
    if options.source is None:
        raise UserError("nothing to do: give --check DIR, or what to convert and --out DIR")
    return convert(options, options.source)


if __name__ == "__main__":
    run_cli(main)
