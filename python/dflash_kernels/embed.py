"""From compiled images to C++: the image table, the typed launchers, and the build report.

    python -m dflash_kernels.embed AOT_DIR GENERATED_DIR SM [SM ...]

Reads AOT_DIR/*.json and writes into GENERATED_DIR
  images.S       every image by `.incbin`: no parsing, no giant array literals
  images.inc     the table `csrc/kernels.cpp` looks images up in
  launchers.inc  one typed function per kernel, generated from the same spec the compile gate checks
  report.json    what was built, for `dflash_ext._C.build_report()` and the build log
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dflash_kernels.spec import TYPES, Computed, Kernel, TensorMap, VectorMap
from dflash_kernels.variants import KERNELS, KEY_TILE, variants


def assembly(stems: dict[str, Path]) -> str:
    lines = ['.section .rodata,"a",@progbits']
    for label, path in stems.items():
        lines += [
            ".balign 64",
            f".hidden dflash_{label}",
            f".globl dflash_{label}",
            f"dflash_{label}:",
            f'.incbin "{path}"',
        ]
    # Without this note the linker would make the whole library's stack executable.
    return "\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""])


def image_row(record: dict, label: str) -> str:
    ptx = str(record["ptx"]).lower()
    head = f"KernelId::{record['kernel']}, {record['head_dim']}, {record['sm']}, {ptx}"
    tail = f"{record['tile']}, {record['threads']}, {record['shared_bytes']}"
    return f'  {{{head}, "{record["symbol"]}", dflash_{label}, {tail}}},'


def encode(name: str, kind: TensorMap | VectorMap) -> str:
    """C++ that encodes a map from host arguments."""
    if isinstance(kind, VectorMap):
        return (
            f"const CUtensorMap {name} = vector_map({kind.tensor}_ptr, {kind.length}, {kind.box});"
        )
    if kind.contiguous:
        strides = f"int64_t({kind.heads}) * head_dim, head_dim"
    else:
        strides = f"{kind.tensor}_row, {kind.tensor}_head"
    return (
        f"const CUtensorMap {name} = rows_map({kind.tensor}_ptr, {kind.rows}, {kind.heads}, "
        f"head_dim, {strides}, {kind.box_rows}, {kind.box_heads});"
    )


def launcher(kernel: Kernel) -> str:
    """One function: resolves the image, computes the grid, launches; throws on any error."""
    typed = [f"[[maybe_unused]] {TYPES[kind][1]} {name}" for name, kind in kernel.host.items()]
    made: list[str] = []
    values: list[str] = []
    sizes: list[str] = []
    for name, kind in kernel.arguments.items():
        values.append(f"&{name}")
        sizes.append(f"sizeof({name})")
        if isinstance(kind, Computed):
            made.append(f"const int32_t {name} = {kind.expression};")
        elif not isinstance(kind, str):
            made.append(encode(name, kind))
            # Extents and strides follow the map; the build checks that the code reads none.
            values += ["&unread"] * 2 * kind.rank
            sizes += ["4"] * kind.rank + ["8"] * kind.rank
    counters = [name for name, kind in kernel.arguments.items() if kind == "counter*"]
    if any(value == "&unread" for value in values):
        made = ["const ContextScope scope = enter_device(device);", *made]
        made.append("const int64_t unread = 0;")
    body = "".join(f"  {line}\n" for line in made)
    arguments = ", ".join(f"const_cast<void*>(static_cast<const void*>({v}))" for v in values)
    return f"""
inline void {kernel.name}(int device, uint64_t stream, int head_dim, {", ".join(typed)}) {{
{body}  static const size_t sizes[] = {{{", ".join(sizes)}}};
  void* values[] = {{{arguments}, nullptr, nullptr}};
  launch(KernelId::{kernel.name}, device, stream, head_dim, values, sizes, std::size(sizes),
         {counters[0] if counters else 0},
         [&]([[maybe_unused]] int64_t tile, [[maybe_unused]] int64_t multiprocessors) -> int64_t {{
           return {kernel.grid};
         }});
}}
"""


def bind(kernel: Kernel) -> str:
    names = ", ".join(f'py::arg("{name}")' for name in ("device", "stream", "head_dim"))
    names += "".join(f', py::arg("{name}")' for name in kernel.host)
    # The driver call can wait for the device's queue: never hold the GIL over it.
    return (
        f'  module.def("{kernel.name}", &{kernel.name}, {names},\n'
        f"             py::call_guard<py::gil_scoped_release>());"
    )


def format_report(report: list[dict]) -> str:
    rows = [f"{'variant':34} {'bytes':>8} {'regs':>4} {'stack':>5} {'shared':>7} {'threads':>7}"]
    for r in report:
        dim = f" d{r['head_dim']}" if r["head_dim"] else ""
        ptx = " PTX" if r["ptx"] else ""
        rows.append(
            f"{r['kernel'] + dim + ' sm_' + str(r['sm']) + ptx:34} {r['bytes']:8} "
            f"{r['registers']:4} {r['stack_bytes']:5} {r['shared_bytes']:7} {r['threads']:7}"
        )
    total = sum(r["bytes"] for r in report)
    architectures = sorted({r["sm"] for r in report})
    rows.append(f"{len(report)} images for sm {architectures}, {total / 2**20:.1f} MiB in all")
    return "\n".join(rows)


def main(argv: list[str]) -> None:
    aot, generated = Path(argv[0]).resolve(), Path(argv[1])
    architectures = tuple(int(sm) for sm in argv[2:])
    generated.mkdir(parents=True, exist_ok=True)
    blobs: dict[str, Path] = {}
    rows: list[str] = []
    report: list[dict] = []
    for variant in variants(architectures):
        record = json.loads((aot / f"{variant.stem}.json").read_text())
        report.append(record)
        blobs[variant.stem] = aot / f"{variant.stem}.bin"
        rows.append(image_row(record, variant.stem))
    ids = ", ".join(k.name for k in KERNELS)
    names = ", ".join(f'"{k.name}"' for k in KERNELS)
    externs = "\n".join(f"extern const unsigned char dflash_{label}[];" for label in blobs)
    (generated / "images.S").write_text(assembly(blobs))
    (generated / "kernel_ids.inc").write_text(
        f"enum class KernelId : int {{ {ids} }};\n"
        f"inline constexpr const char* kKernelNames[] = {{{names}}};\n"
        f"inline constexpr int kNumKernels = {len(KERNELS)};\n"
        f"inline constexpr int kKeyTile = {KEY_TILE};\n"
    )
    (generated / "images.inc").write_text(
        'extern "C" {\n'
        + externs
        + "\n}\nstatic const Image kImages[] = {\n"
        + "\n".join(rows)
        + "\n};\n"
    )
    (generated / "launchers.inc").write_text(
        "".join(launcher(k) for k in KERNELS)
        + "\ninline void bind_launchers(py::module_& module) {\n"
        + "\n".join(bind(k) for k in KERNELS)
        + "\n}\n"
    )
    text = json.dumps(report, indent=1)
    (generated / "report.json").write_text(text + "\n")
    # 16 KB pieces: compilers need only support string literals of 64 KB.
    pieces = [text[i : i + 16000] for i in range(0, len(text), 16000)]
    literal = "\n".join(f'R"DFLASH({piece})DFLASH"' for piece in pieces)
    (generated / "report.inc").write_text(f"static const char kBuildReport[] =\n{literal};\n")


if __name__ == "__main__":
    main(sys.argv[1:])
