"""How results of `bench target` are shown."""

from __future__ import annotations

from dflash_ext.bench.kernel_kinds import kinds_table
from dflash_ext.bench.markdown import Columns, Row, markdown
from dflash_ext.bench.shapes import FORWARD_MEMORY, FORWARD_OVER_PLAIN, FP8_OVER_BF16, reached

BATCHES: Columns = [
    ("target", "shape", "{}"),
    ("layers", "layers", "{}"),
    ("batch", "case", "{}"),
    ("tokens/s", "ours_ktok_s", "{:.3g}k"),
    ("TFLOP/s", "ours_tflops", "{:.3g}"),
    ("× product", "ours_over_product", "{:.2f}"),
    ("× plain transformers, SDPA, padded", "over_plain", "{}"),
    ("packed, transformers' layers, × plain", "own_layers_over_plain", "{:.2f}"),
    ("peak over weights + output", "memory", "{}"),
]
FP8: Columns = [
    ("target", "shape", "{}"),
    ("batch", "case", "{}"),
    ("bf16 tokens/s", "ours_ktok_s", "{:.3g}k"),
    ("FP8 tokens/s", "fp8_ktok_s", "{:.3g}k"),
    ("× bf16", "over", "{}"),
]
TAPS: Columns = [
    ("target", "shape", "{}"),
    ("tap", "tap", "{}"),
    ("error in bf16, against fp32", "bf16", "{:.2e}"),
    ("error in FP8", "fp8", "{:.2e}"),
    ("× bf16's", "fp8_over_bf16", "{:.1f}"),
]


def target_table(result: Row) -> str:
    """A row per batch; then FP8 beside bf16."""
    rows = []
    for row in result["rows"]:
        shown = dict(row) | {"over_plain": f"{row['over_plain']:.2f}"}
        if target := FORWARD_OVER_PLAIN.get((row["shape"], row["case"])):
            at = reached(row["over_plain"], target)
            shown["over_plain"] += f" ({target.floor:.2f} → {target.goal:.2f}: {at})"
        if "memory" in row:
            at = reached(row["memory"], FORWARD_MEMORY, smaller=True)
            shown["memory"] = f"{row['memory']:.2f} ({FORWARD_MEMORY.floor:.2f}: {at})"
        rows.append(shown)
    tables = [markdown(BATCHES, rows)]
    if speeds := _fp8(result, "rows"):
        for row in speeds:
            at = reached(row["fp8_over_ours"], FP8_OVER_BF16)
            row["over"] = f"{row['fp8_over_ours']:.2f} ({FP8_OVER_BF16.floor:.2f}: {at})"
        tables.append(markdown(FP8, speeds))
    return "\n\n".join(tables)


def target_details(result: Row) -> str:
    """Where the time goes; what FP8 does to each tap."""
    parts = [kinds_table(result["rows"], "shape")]
    if taps := _fp8(result, "taps"):
        parts.append(
            "Taps against transformers' own forward in fp32, of the same random weights:\n\n"
            + markdown(TAPS, taps)
        )
    return "\n\n".join(part for part in parts if part)


def _fp8(result: Row, part: str) -> list[Row]:
    measured = result.get("fp8", {})
    return [row | {"shape": shape} for shape, parts in measured.items() for row in parts[part]]
