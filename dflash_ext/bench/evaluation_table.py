"""How a result of `python -m dflash_ext.evaluate --json` is shown among the published numbers."""

from __future__ import annotations

from dflash_ext.bench.markdown import Columns, Row, markdown


def evaluation_table(result: Row) -> str:
    """Accepted length of every method, a row per prompt set; speed over plain decoding."""
    guided = [name for name in result["methods"] if name != "plain"]
    columns: Columns = [
        ("prompts", "name", "{}"),
        *((name, name, "{:.2f}") for name in guided),
        ("equals plain", "equal", "{}"),
        ("chain, tok/s over plain", "chain's speed", "{:.2f}"),
        ("fastest", "fastest", "{}"),
    ]
    rows = []
    for one in result["sets"]:
        same, prompts = min(one[name]["identical"] for name in guided), one["chain"]["prompts"]
        row: Row = {name: one[name]["accept_len"] for name in guided}
        row |= {"name": one["name"], "equal": f"{same}/{prompts}"}
        plain = one["plain"]["tokens_per_second"]
        speeds = {name: one[name]["tokens_per_second"] / plain for name in result["methods"]}
        fastest = max(speeds, key=lambda name: speeds[name])
        row["fastest"] = f"{fastest}, {speeds[fastest]:.2f}"
        rows.append(row | {"chain's speed": speeds["chain"]})
    decoding = result["decoding"]
    return (
        f"Blocks of {result['block_size']}, {decoding['max_new_tokens']} tokens a prompt, batches "
        f"of {decoding['batch']}, {result['dtype']}.\n\n{markdown(columns, rows)}"
    )
