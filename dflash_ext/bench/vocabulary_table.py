"""How results of `bench vocabulary` are shown."""

from __future__ import annotations

from dflash_ext.bench.markdown import Columns, Row, markdown

LOSSES: Columns = [
    ("loss and its gradient", "what", "{}"),
    ("ms", "ms", "{:.1f}"),
    ("× its two products", "over_products", "{:.2f}"),
    ("peak GiB", "peak_gib", "{:.2f}"),
]
NAMES = {
    "products": "the two products alone",
    "ce": "ce",
    "dpace": "dpace",
    "ce_bf16_logits": "ce, logits in bf16",
    "kl": "kl (three products)",
    "lk": "lk (three products)",
    "naive": "torch, all logits at once",
}
KERNELS: Columns = [
    ("logits", "logits", "{}"),
    ("statistics, × copy", "statistics_over_copy", "{:.2f}"),
    ("gradient", "gradient_over_copy", "{:.2f}"),
    ("kl", "kl_over_copy", "{:.2f}"),
    ("lk", "lk_over_copy", "{:.2f}"),
]


def vocabulary_table(result: Row) -> str:
    """The losses beside their matrix products, and their kernels beside the device's copy."""
    loss = result["loss"]
    rows = [
        {
            "what": name,
            "ms": loss[f"{key}_ms"],
            "over_products": loss[f"{key}_ms"] / loss["products_ms"],
            "peak_gib": loss[f"{key}_peak_gib"],
        }
        for key, name in NAMES.items()
        if f"{key}_ms" in loss
    ]
    size = f"{loss['rows']:,} rows, vocabulary {loss['vocab']:,}, hidden {loss['hidden']:,}"
    size += f", chunks of {loss['chunk_rows']:,} rows"
    return f"{size}.\n\n{markdown(LOSSES, rows)}\n\n{markdown(KERNELS, result['operators'])}"
