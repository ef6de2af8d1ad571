"""Build dflash_ext._C with one ninja file: Triton ahead of time -> .incbin -> C++ -> link.

Needs no torch, no nvcc and no GPU. DFLASH_SM chooses the architectures ("90", "80,90").
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "python"))

TRITON = "3.6.0"  # as in pyproject.toml: what the kernels were tuned and checked with
GIB = 2**30
JOB_MEMORY = 1.5 * GIB  # one Triton or C++ compile at its peak, measured, rounded up
CXX_FLAGS = "-O3 -std=c++17 -fPIC -fvisibility=hidden -Wall -Wextra"
# A call costs the same with either (4.0 us for 32 arguments); pybind11 compiles a quarter faster.
FLAGS = {"bindings": "-O1"}
# The CPU operator is one source compiled per instruction set and chosen at run time.
X86_FLAGS = {
    "attention_avx2": "-mavx2 -mfma",
    "attention_avx512": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma",
}


def parallel_jobs() -> int:
    """Bounded by cores and by memory that is free now. MAX_JOBS lowers it further."""
    cores = len(os.sched_getaffinity(0))
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # counts reclaimable page cache too
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    jobs = max(1, min(cores, int(free / JOB_MEMORY)))
    return min(jobs, int(os.environ.get("MAX_JOBS", jobs)))


def escape(path: object) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def write_ninja(build: Path, output: Path) -> Path:
    import triton
    from dflash_kernels import launchers
    from dflash_kernels.variants import (
        COMPILER,
        parse_architectures,
        unit_digest,
        unit_sources,
        unit_variants,
        units,
    )

    try:
        architectures = parse_architectures(os.environ.get("DFLASH_SM"))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    if triton.__version__ != TRITON:
        raise SystemExit(
            f"error: found triton {triton.__version__}, expected {TRITON}: build with pip's "
            f"isolation (the default), or pip install triton=={TRITON} first"
        )
    archs = " ".join(map(str, architectures))
    package = ROOT / "python" / "dflash_kernels"
    includes = [ROOT / "csrc", build / "generated", sysconfig.get_path("include")]
    step = f"{escape(sys.executable)} -IS {escape(package / 'forks.py')}"
    lines = [
        f"includes = {' '.join(f'-I{escape(i)}' for i in includes)}",
        "rule compile",
        f"  command = {step} compile $args # $declared",
        "  description = triton $args",
        "rule embed",
        f"  command = {step} embed $args",
        "  description = embed",
        "rule cxx",
        f"  command = c++ {CXX_FLAGS} $flags $includes -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = c++ $in",
        "rule link",
        "  command = c++ -shared $in -o $out -ldl -pthread -Wl,-z,noexecstack -Wl,--gc-sections -s",
        "  description = link $out",
    ]
    generated = build / "generated"
    launchers.write(generated)
    objects: list[Path] = []

    def compile_source(source: Path, waits_for: str = "") -> None:
        objects.append(build / "obj" / f"{source.stem}_{source.parent.name}.o")
        lines.extend(
            [
                f"build {escape(objects[-1])}: cxx {escape(source)} {waits_for}",
                f"  flags = {(FLAGS | X86_FLAGS).get(source.stem, '')}",
            ]
        )

    x86 = platform.machine() in ("x86_64", "AMD64")
    sources = sorted([*(ROOT / "csrc").glob("*.cpp"), *(ROOT / "csrc" / "cpu").glob("*.cpp")])
    table = ROOT / "csrc" / "images.cpp"
    for source in sources:
        if source != table and (x86 or source.stem not in X86_FLAGS):
            compile_source(source)

    aot = build / "aot"
    compiler = [package / f"{name}.py" for name in COMPILER]
    images: list[Path] = []
    for name, head_dim in units():
        made = unit_variants(name, head_dim, architectures)
        outputs = [aot / f"{v.stem}.{kind}" for v in made for kind in ("json", "bin")]
        images += outputs
        outs = " ".join(escape(o) for o in outputs)
        # Another kernel's code or tiles compile nothing again here.
        code = " ".join(escape(p) for p in [*unit_sources(name), *compiler])
        lines += [
            f"build {outs}: compile | {code}",
            f"  args = {name} {head_dim} {escape(aot)} {archs}",
            f"  declared = {unit_digest(made)}",
        ]
    written = ["images.S", "images.inc", "report.inc", "report.json"]
    inputs = " ".join(escape(i) for i in [*images, package / "embed.py", package / "variants.py"])
    # Ninja starts first what most steps in a row wait for. By waiting for the C++ too, which it
    # does not read, this one keeps the slow bindings.cpp from being left for the end.
    lines += [
        f"build {' '.join(escape(generated / m) for m in written)}: embed | {inputs} || "
        + " ".join(escape(o) for o in objects),
        f"  args = {escape(aot)} {escape(generated)} {archs}",
    ]
    compile_source(table, f"|| {escape(generated / 'images.inc')}")
    # .incbin reads the images, so the assembly depends on them and not only on its text.
    compile_source(generated / "images.S", "| " + " ".join(escape(i) for i in images))
    objs = " ".join(escape(o) for o in objects)
    lines += [f"build {escape(output)}: link {objs}", f"default {escape(output)}", ""]
    build.mkdir(parents=True, exist_ok=True)
    aot.mkdir(exist_ok=True)
    ninja_file = build / "build.ninja"
    ninja_file.write_text("\n".join(lines))
    return ninja_file


def build_environment() -> dict[str, str]:
    """What the C++ compiler finds beside its arguments: the build requirements' headers.

    pip's build isolation puts triton and pybind11 into a folder of another name each time. In the
    environment they reach the commands without becoming part of them, and ninja, which compares
    commands, does not compile everything again.
    """
    import pybind11
    import triton

    cuda = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    paths = os.pathsep.join([pybind11.get_include(), str(cuda)])
    return os.environ | {"CPLUS_INCLUDE_PATH": paths}


def build_steps() -> dict[str, Callable[[list[str]], None]]:
    """The steps that need Triton or the declarations, as the forks do them."""
    from dflash_kernels import compile, embed

    compile.warm()
    return {"compile": compile.main, "embed": embed.main}


class NinjaBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        output.parent.mkdir(parents=True, exist_ok=True)
        # Kept between builds (and apart per Python), so an unchanged tree links nothing again.
        build = ROOT / "build" / f"ninja-{sysconfig.get_config_var('SOABI')}"
        started = time.time()
        ninja_file = write_ninja(build, output)
        import ninja
        from dflash_kernels import forks

        command = [Path(ninja.BIN_DIR) / "ninja", "-f", ninja_file, "-j", str(parallel_jobs())]
        with forks.server(build_steps) as requests:
            done = subprocess.run(
                [str(c) for c in command],
                cwd=build,
                env=build_environment() | {forks.VARIABLE: str(requests)},
                pass_fds=[requests],
            )
        if done.returncode:
            raise SystemExit("error: building dflash_ext._C failed; the failing command is above")
        self.print_report(build, output, time.time() - started)

    @staticmethod
    def print_report(build: Path, output: Path, seconds: float) -> None:
        import json

        from dflash_kernels.embed import format_report

        print(format_report(json.loads((build / "generated" / "report.json").read_text())))
        print(f"{output.name}: {output.stat().st_size / 2**20:.1f} MiB in {seconds:.0f} s")


setup(
    ext_modules=[Extension("dflash_ext._C", sources=[])],
    cmdclass={"build_ext": NinjaBuild},
)
