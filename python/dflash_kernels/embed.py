"""From compiled images to C++: the image table and the build report.

    python -m dflash_kernels.embed AOT_DIR GENERATED_DIR SM [SM ...]

Reads AOT_DIR/*.json and writes into GENERATED_DIR
  images.S       every image by `.incbin`: no parsing, no giant array literals
  images.inc     the table `csrc/kernels.cpp` looks images up in
  report.json    what was built, for `dflash_ext._C.build_report()` and the build log
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dflash_kernels.variants import variants


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
    externs = "\n".join(f"extern const unsigned char dflash_{label}[];" for label in blobs)
    (generated / "images.S").write_text(assembly(blobs))
    (generated / "images.inc").write_text(
        'extern "C" {\n'
        + externs
        + "\n}\nstatic const Image kImages[] = {\n"
        + "\n".join(rows)
        + "\n};\n"
    )
    text = json.dumps(report, indent=1)
    (generated / "report.json").write_text(text + "\n")
    # 16 KB pieces: compilers need only support string literals of 64 KB.
    pieces = [text[i : i + 16000] for i in range(0, len(text), 16000)]
    literal = "\n".join(f'R"DFLASH({piece})DFLASH"' for piece in pieces)
    (generated / "report.inc").write_text(f"static const char kBuildReport[] =\n{literal};\n")


if __name__ == "__main__":
    main(sys.argv[1:])
