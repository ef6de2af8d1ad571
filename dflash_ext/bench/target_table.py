"""How results of `bench target` are shown."""

from __future__ import annotations

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
KINDS: Columns = [
    ("target", "shape", "{}"),
    ("batch", "case", "{}"),
    ("forward", "way", "{}"),
    ("kernels, ms", "ms", "{:.0f}"),
    ("products", "products", "{}"),
    ("attention", "attention", "{}"),
    ("row-wise", "row-wise", "{}"),
    ("rest", "rest", "{}"),
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
    """A row per batch; then, if it was measured, where the time goes."""
    rows, kinds = [], []
    for row in result["rows"]:
        shown = dict(row) | {"over_plain": f"{row['over_plain']:.2f}"}
        if target := FORWARD_OVER_PLAIN.get((row["shape"], row["case"])):
            at = reached(row["over_plain"], target)
            shown["over_plain"] += f" ({target.floor:.2f} → {target.goal:.2f}: {at})"
        if "memory" in row:
            at = reached(row["memory"], FORWARD_MEMORY, smaller=True)
            shown["memory"] = f"{row['memory']:.2f} ({FORWARD_MEMORY.floor:.2f}: {at})"
        rows.append(shown)
        for way, times in row.get("kinds", {}).items():
            ms = {k: v for k, v in times.items() if k != "longest"}
            whole = sum(ms.values())
            kinds.append(
                {"shape": row["shape"], "case": row["case"], "way": way, "ms": whole}
                | {kind: f"{v:.0f} ({v / whole:.0%})" for kind, v in ms.items()}
            )
    tables = [markdown(BATCHES, rows)]
    if kinds:
        tables.append(markdown(KINDS, kinds))
    for shape, measured in result.get("fp8", {}).items():
        tables += fp8_tables(shape, measured)
    return "\n\n".join(tables)


def fp8_tables(shape: str, measured: Row) -> list[str]:
    """Speed of FP8 beside bf16, and what it does to the taps."""
    rows = [row | {"shape": shape} for row in measured["rows"]]
    for row in rows:
        at = reached(row["fp8_over_ours"], FP8_OVER_BF16)
        row["over"] = f"{row['fp8_over_ours']:.2f} ({FP8_OVER_BF16.floor:.2f}: {at})"
    return [
        markdown(FP8, rows),
        markdown(TAPS, [row | {"shape": shape} for row in measured["taps"]]),
    ]
