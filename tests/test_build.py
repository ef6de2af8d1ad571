"""The build's gates, its generated code and its independence of the installed torch.

Each check of the Triton side runs in a fresh process: this one may have imported Triton with its
interpreter switched on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton_sources import PYTHON, ROOT, compiling, needs_triton


@needs_triton
def test_shared_memory_over_the_limit_fails_the_build() -> None:
    script = """
import dataclasses, tempfile, pathlib
from dflash_kernels import compile, variants
kernel = variants.kernel_named("attention_bwd_dq")
deep = {128: kernel.choices[128] | dict(STAGES=4)}       # a tile that only large GPUs can hold
large = dataclasses.replace(kernel, choices=deep, small={})
compile.build([variants.Variant(large, 128, 86)], pathlib.Path(tempfile.mkdtemp()))
"""
    done = compiling(script)
    last = done.stderr.splitlines()[-1]
    assert "GateError: attention_bwd_dq_d128_sm86: " in last
    assert last.endswith("bytes of shared memory, its devices have 101376")


@needs_triton
def test_a_launcher_that_disagrees_with_the_kernel_fails_the_build() -> None:
    script = """
import dataclasses, tempfile, pathlib
from dflash_kernels import compile, variants
kernel = variants.kernel_named("attention_layout")
variant = variants.Variant(kernel, 0, 90)
ptx = compile.compile_variant(variant).ptx
compile.abi_gate(variant, ptx)                            # agrees as declared
wrong = dataclasses.replace(kernel, arguments=kernel.arguments | {"num_ctx": "i32*"})
compile.abi_gate(variants.Variant(wrong, 0, 90), ptx)
"""
    done = compiling(script)
    assert "GateError: attention_layout_sm90: PTX parameters [" in done.stderr.splitlines()[-1]


@needs_triton
def test_declared_arguments_must_be_the_functions() -> None:
    script = """
import dataclasses
from dflash_kernels import spec, variants
for kernel in variants.KERNELS:
    spec.check_signature(kernel)
kernel = variants.kernel_named("attention_fwd")
swapped = dict(reversed(kernel.arguments.items()))
spec.check_signature(dataclasses.replace(kernel, arguments=swapped))
"""
    assert "ValueError: attention_fwd: declared" in compiling(script).stderr.splitlines()[-1]


@needs_triton
@pytest.mark.parametrize(
    ("text", "expected"),
    [("", "(80, 86, 90, 100, 120)"), ("90", "(90,)"), ("sm_90a, 80", "(80, 90)")],
)
def test_architectures_are_chosen_by_environment(text: str, expected: str) -> None:
    script = f"from dflash_kernels.variants import *; print(parse_architectures({text!r}))"
    assert compiling(script).stdout.strip() == expected


@needs_triton
def test_unknown_architecture_is_one_line() -> None:
    done = compiling(
        "import runpy, sys; sys.argv=['setup.py', 'build_ext']; runpy.run_path('setup.py')",
        DFLASH_SM="75",
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == "error: DFLASH_SM='75': expected a list of [80, 86, 89, 90, 100, 120]"


@needs_triton
def test_another_triton_is_refused() -> None:
    script = """
import runpy, sys, triton
triton.__version__ = "3.7.1"
sys.argv = ["setup.py", "build_ext"]
runpy.run_path("setup.py")
"""
    done = compiling(script)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: found triton 3.7.1, expected 3.6.0:")


@needs_triton
def test_images_are_reproducible_and_owe_nothing_to_their_neighbours(tmp_path: Path) -> None:
    """Made one by one or by the job of all architectures: the same bytes and records."""
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    alone.mkdir()
    shared.mkdir()
    script = """
import pathlib
from dflash_kernels import compile, variants
for variant in variants.unit_variants("attention_layout", 0, (80, 86, 90)):
    compile.build([variant], pathlib.Path({folder!r}))
"""
    done = compiling(script.format(folder=str(alone)))
    assert not done.returncode, done.stderr
    command = [sys.executable, "-m", "dflash_kernels.compile", "attention_layout", "0"]
    env = os.environ | {"PYTHONPATH": str(PYTHON), "TRITON_INTERPRET": "0"}
    subprocess.run([*command, str(shared), "80", "86", "90"], check=True, env=env)
    made = {file.name: file.read_bytes() for file in shared.iterdir()}
    assert len(made) == 2 * (3 + 1)
    assert made == {file.name: file.read_bytes() for file in alone.iterdir()}
    assert b".target sm_80\n" in made["attention_layout_sm80_ptx.bin"]


@needs_triton
def test_only_equal_tiles_share_their_code() -> None:
    """One kernel has another tile on small devices (sm_86, 120, and the PTX), one has not."""
    script = """
from types import SimpleNamespace
from dflash_kernels import compile, variants
def compile_variant(variant, ttir=""):
    calls.append(f"compile sm_{variant.sm}" + f" from {ttir}" * bool(ttir))
    return SimpleNamespace(ttir=f"sm_{variant.sm}")
def assemble(code, sm):
    calls.append(f"assemble sm_{sm} from {code.ttir}")
    return code
compile.compile_variant, compile.assemble, compile.write = compile_variant, assemble, lambda *_: 0
for name, dim in (("attention_bwd_dkv", 128), ("swiglu_fwd", 0)):
    calls = []
    compile.build(variants.unit_variants(name, dim, (80, 86, 90, 120)), None)
    print("; ".join(calls))
"""
    different, same = compiling(script).stdout.splitlines()
    assert different == (
        "compile sm_80; compile sm_86; compile sm_90 from sm_80; compile sm_120 from sm_86; "
        "assemble sm_80 from sm_86"
    )
    assert same == (
        "compile sm_80; assemble sm_86 from sm_80; compile sm_90 from sm_80; "
        "compile sm_120 from sm_80"
    )


@needs_triton
def test_images_depend_on_all_of_the_compile_step() -> None:
    """Ninja compiles again what a changed file of it would make otherwise."""
    script = """
from dflash_kernels import compile, variants
ours = {n.split(".")[1] for n in sys.modules if n.startswith("dflash_kernels.")}
kernels = {p.stem for name, _ in variants.units() for p in variants.unit_sources(name)}
declarations = {n for n in ours if n.endswith("variants")}
print(sorted(ours - kernels - declarations), sorted(variants.COMPILER), sep="\\n")
"""
    done = compiling("import sys" + script)
    assert done.returncode == 0, done.stderr
    imported, listed = done.stdout.splitlines()
    assert imported == listed


def test_report_covers_every_variant_built() -> None:
    from dflash_ext import _C

    report = json.loads(_C.build_report())
    built = {(r["kernel"], r["head_dim"], r["sm"]) for r in report if not r["ptx"]}
    architectures = _C.built_architectures()
    kernels = ("attention_fwd", *(f"attention_bwd_{k}" for k in ("dq", "dkv", "own")))
    expected = {(k, d, sm) for k in kernels for d in (64, 128, 256) for sm in architectures}
    vocabulary = [
        f"vocabulary_{k}_{x}" for k in ("statistics", "gradient") for x in ("f32", "bf16")
    ]
    vocabulary += ["vocabulary_kl", "vocabulary_lk"]
    row_wise = ("rms_norm_fwd_4096", "rms_norm_fwd_8192", "rms_norm_bwd_4096", "rms_norm_bwd_8192")
    alone = ("attention_layout", "swiglu_fwd", "swiglu_bwd", *row_wise, *vocabulary)
    expected |= {(k, 0, sm) for k in alone for sm in architectures}
    rotary = ("head_norm_rope_fwd", "head_norm_rope_bwd")
    expected |= {(k, d, sm) for k in rotary for d in (64, 128, 256) for sm in architectures}
    expected |= {("quantise_rows", 0, sm) for sm in architectures if sm >= 90}
    if 90 in architectures:  # maps and wgmma: Hopper's own
        own = [f"hopper_{k}_own{n}" for k in ("fwd", "bwd_dq") for n in (16, 32, 64)]
        mapped = [k.replace("attention", "attention_tma") for k in kernels]
        kept = ["attention_bwd_delta", "attention_bwd_delta_pairs", "attention_bwd_dq_kept"]
        kept += [f"{k}_keep" for k in ("hopper_bwd_dkv", *mapped[2:])]
        alone_90 = [*own, "hopper_bwd_dkv", *mapped, *kept]
        expected |= {(k, d, 90) for k in alone_90 for d in (64, 128)}
        wide = ("fwd", "bwd_dq", "bwd_dk", "bwd_dv")
        expected |= {(f"attention_tma_{k}", 256, 90) for k in wide}
    assert built == expected
    fallback = {(r["kernel"], r["head_dim"], 80) for r in report if r["ptx"]}
    assert fallback == {x for x in expected if x[2] == 80}
    for row in report:  # PTX may land on any device, so it must fit the smallest
        limit = 99 * 1024 if row["ptx"] or row["sm"] in (86, 120) else 227 * 1024
        assert row["shared_bytes"] <= limit
    for row in report:
        assert row["registers"] > 0
        assert row["bytes"] > 0
        assert row["stack_bytes"] >= 0


def test_the_extension_knows_neither_torch_nor_cuda_libraries() -> None:
    """One build serves every torch: the module loads alone and links only system libraries."""
    from dflash_ext import _C

    script = "import sys; from dflash_ext import _C; print('torch' in sys.modules, _C.KEY_TILE)"
    done = compiling(script, PYTHONPATH=str(ROOT))
    assert done.stdout.strip() == "False 64", done.stderr
    needed = subprocess.run(["ldd", _C.__file__], capture_output=True, text=True, check=True).stdout
    libraries = {line.split()[0].split(".so")[0] for line in needed.splitlines()}
    assert not {x for x in libraries if "cuda" in x or "torch" in x or "c10" in x}


def test_nothing_in_the_package_imports_triton_or_compiles() -> None:
    """The run path has no JIT: no Triton, torch.compile, FX or flex_attention but in benchmarks."""
    banned = ("triton", "torch.compile", "flex_attention", "torch.fx import", "import torch.fx")
    for file in (ROOT / "dflash_ext").rglob("*.py"):
        if "bench" in file.parts:
            continue
        code = "\n".join(line.split("#")[0] for line in file.read_text().splitlines())
        imports = [x for x in code.splitlines() if x.lstrip().startswith(("import ", "from "))]
        for word in banned:
            assert not any(word in line for line in imports), (file, word)
        assert "torch.compile(" not in code, file
