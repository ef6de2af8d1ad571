"""How results of `bench pipeline` are shown."""

from __future__ import annotations

from dflash_ext.bench.headline_table import headline_table
from dflash_ext.bench.markdown import Columns, Row, markdown

PACE: Columns = [
    ("steps", "steps", "{}"),
    ("Ktok/s", "ktok_s", "{:.1f}"),
    ("of the slower side alone (0.95): the same batches", "share_of_slower_side", "{:.3f}"),
    ("all steps, by tokens", "share_over_all_steps", "{:.3f}"),
    ("slower side", "slower_side", "{}"),
    ("target waits", "wait_target", "{:.1%}"),
    ("drafter waits", "wait_drafter", "{:.1%}"),
    ("MFU, target", "mfu_target", "{:.2f}"),
    ("MFU, drafter", "mfu_drafter", "{:.2f}"),
    ("memory, drafter (1 %)", "drafter_spread", "{:.2%}"),
    ("memory, target", "target_spread", "{:.2%}"),
    ("launch to first step, s", "seconds_from_launch_to_first_step", "{:.0f}"),
]
USES: Columns = [
    ("on", "where", "{}"),
    ("steps", "steps", "{}"),
    ("seconds, start included", "seconds", "{:.0f}"),
    ("uses of each sample in two epochs", "uses", "{}"),
    ("first loss", "first_loss", "{:.3f}"),
    ("last loss", "last_loss", "{:.3f}"),
]


def pipeline_table(result: Row) -> str:
    """The timed pair of ranks, what eight ranks used, the headline run; whichever was run."""
    parts = []
    if pair := result.get("one_to_one"):
        row = dict(pair)
        for name, key in (("drafter", "reserved_gib"), ("target", "target_reserved_gib")):
            if key in pair:
                row[f"{name}_spread"] = pair[key]["spread"]
        title = f"One target, one drafter, {pair['shape']}, batches of {pair['token_budget']:,}."
        parts.append(f"{title}\n\n{markdown(PACE, [row])}")
    if eight := result.get("five_to_three"):
        places = [name for name in ("cuda", "cpu") if name in eight]
        rows = [
            eight[name] | {"where": name, "uses": str(eight[name]["uses_of_each_sample"])}
            for name in places
        ]
        text = f"Five targets, three drafters, {eight['samples']} samples of a tiny target."
        if "accounting_equal" in eight:
            same = "the same" if eight["accounting_equal"] else "NOT the same"
            text += f" Batches, blocks and uses on both devices: {same}."
        parts.append(f"{text}\n\n{markdown(USES, rows)}")
    if headline := result.get("headline"):
        parts.append(headline_table(headline))
    return "\n\n".join(parts)
