"""`python -m dflash_ext.bench tables`: every published number, generated from benchmarks/*.json.

The README's section between two markers, and docs/benchmarks.md as a whole.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from dflash_ext.bench.evaluation_table import evaluation_table
from dflash_ext.bench.kernel_kinds import kinds_table
from dflash_ext.bench.markdown import Columns, Row, Rows, markdown
from dflash_ext.bench.pipeline_table import pipeline_table
from dflash_ext.bench.runs import runs_table
from dflash_ext.bench.shapes import LAYOUT_MS, STEP_LIMITS, TARGETS, WINDOW_OVERHEAD, reached
from dflash_ext.bench.target_table import target_details, target_table
from dflash_ext.bench.vocabulary_table import vocabulary_table
from dflash_ext.errors import UserError

BEGIN = "<!-- numbers: written by `python -m dflash_ext.bench tables`, do not edit -->"
END = "<!-- end of numbers -->"
DOCS_HEAD = """# Benchmarks

Written by `python -m dflash_ext.bench tables` from `benchmarks/*.json`; do not edit. The README
says what the ratios mean. *× cuDNN*: useful FLOP/s over those of cuDNN's dense causal attention,
32 heads, D 128, the faster of 4,096 and 16,384 tokens, in the same rounds.
"""

PASSES = [
    ("shape", "shape", "{}"),
    ("pass", "pass", "{}"),
    ("path", "path", "{}"),
    ("ms", "ms", "{:.2f}"),
    ("TFLOP/s", "tflops", "{:.0f}"),
    ("× product (floor → goal: reached)", "over_product", "{}"),
    ("plain Triton, × product", "triton_over_product", "{}"),
    ("dS recomputed, × product", "recomputed", "{}"),
    ("× flex", "over_flex", "{}"),
    ("× flex, mask by intervals", "over_flex_intervals", "{:.2f}"),
    ("× cuDNN", "over_cudnn", "{:.2f}"),
]
SWEEPS = [
    ("varied", "shape", "{}"),
    ("path", "path", "{}"),
    ("forward TFLOP/s", "fwd_tflops", "{:.0f}"),
    ("× product", "fwd_over_product", "{:.2f}"),
    ("× cuDNN", "fwd_over_cudnn", "{:.2f}"),
    ("backward TFLOP/s", "bwd_tflops", "{:.0f}"),
    ("× product", "bwd_over_product", "{:.2f}"),
    ("× cuDNN", "bwd_over_cudnn", "{:.2f}"),
    ("layout ms", "layout_ms", "{:.3f}"),
]
WINDOWS = [
    ("layer", "shape", "{}"),
    ("path", "path", "{}"),
    ("visible pairs", "pairs", "{:,}"),
    ("compared with", "plain_pairs", "{:,}"),
    ("on path", "plain_path", "{}"),
    ("forward, a pair", "fwd_overhead", "{:+.1%}"),
    ("backward, a pair", "bwd_overhead", "{:+.1%}"),
    ("at most 5 %", "within", "{}"),
]
FIRST_CALLS = [
    ("shape", "shape", "{}"),
    ("allocator", "allocator", "{}"),
    ("first ms", "first_ms", "{:.2f}"),
    ("first of a fresh problem, ms", "fresh_ms", "{:.2f}"),
    ("hundredth ms", "hundredth_ms", "{:.2f}"),
    ("first over fresh", "first_over_fresh", "{:.2f}"),
    ("first over hundredth", "first_over_hundredth", "{:.2f}"),
    ("cudaMalloc calls", "mallocs", "{}"),
]
FLEX_COSTS = [
    ("shape", "shape", "{}"),
    ("flex: first call s", "flex_first_s", "{:.1f}"),
    ("flex: mask ms", "flex_mask_ms", "{:.1f}"),
    ("our layout ms", "layout_ms", "{:.3f}"),
    ("largest difference from flex", "flex_difference", "{:.1e}"),
]
LAUNCH = [
    ("what the host does", "what", "{}"),
    ("µs", "microseconds", "{:.1f}"),
    ("× one-element add", "over_add", "{:.1f}"),
]
ATTENTION_CPU = [
    ("shape", "shape", "{}"),
    ("dtype", "dtype", "{}"),
    ("forward ms", "fwd_ms", "{:.1f}"),
    ("backward ms", "bwd_ms", "{:.1f}"),
    ("forward + backward, × SDPA with dense mask", "over_sdpa", "{:.1f}"),
]
QUICKSTART = [
    ("prompts", "prompts", "{}"),
    ("before", "before", "{:.2f}"),
    ("after", "after", "{:.2f}"),
    ("prompt lookup", "prompt lookup", "{:.2f}"),
    ("equals greedy", "equals greedy", "{}"),
]


STEP = [
    ("drafter", "drafter", "{}"),
    ("batch", "case", "{}"),
    ("forward", "forward_ms", "{:.1f}"),
    ("loss", "loss_ms", "{:.1f}"),
    ("backward", "backward_ms", "{:.1f}"),
    ("all three, ms", "step", "{}"),
    ("with an FP8 head", "fp8_head_ms", "{:.1f}"),
    ("optimizer", "optimizer_ms", "{:.1f}"),
    ("MFU", "mfu", "{:.2f}"),
    ("product TFLOP/s", "product_tflops", "{:.3g}"),
    ("× composition", "over_baseline", "{:.2f}"),
    ("peak GiB", "peak", "{}"),
    ("composition's", "baseline_peak_gib", "{:.1f}"),
]


def aimed(row: Row, key: str) -> str:
    """A ratio beside what it must reach: "0.84 (0.83 → 0.90: floor)"."""
    if row["shape"] not in TARGETS.get(key, {}):
        return f"{row[key]:.2f}"
    target = TARGETS[key][row["shape"]]
    goal = "" if target.goal is None else f" → {target.goal:.2f}"
    return f"{row[key]:.2f} ({target.floor:.2f}{goal}: {reached(row[key], target)})"


def one_pass(row: Row, p: str, name: str) -> Row:
    """The forward (`p` "fwd") or backward half of an A-D row, its ratios beside their targets."""
    keys = {"over_product": f"{p}_over_product", "over_flex": f"{p}_over_flex"}
    keys["triton_over_product"] = f"triton_{p}_over_product"
    half = {k: aimed(row, key) for k, key in keys.items() if key in row}
    if f"recomputed_{p}_over_product" in row:
        ours, plain = (row[f"{n}_{p}_over_product"] for n in ("recomputed", "triton_recomputed"))
        half["recomputed"] = f"{ours:.2f}, plain {plain:.2f}"
    others = ("ms", "tflops", "over_flex_intervals", "over_cudnn")
    half |= {k: row[f"{p}_{k}"] for k in others if f"{p}_{k}" in row}
    return {"shape": row["shape"], "pass": name, "path": row["path"]} | half


def attention_table(shapes: Rows) -> str:
    """Shapes A-D, a row per pass; then what the letters mean and what the layout costs."""
    halves = [
        one_pass(row, p, name)
        for row in shapes
        for p, name in (("fwd", "forward"), ("bwd", "backward"))
    ]
    text = markdown(PASSES, halves)
    text += "\n\n" + "; ".join(f"{row['shape']}: {row['what']}" for row in shapes) + "."
    if any(row.get("kept_gb") for row in shapes):
        kept = ", ".join(f"{row['kept_gb']:.2g}" for row in shapes)
        text += (
            f" The backward keeps dS between its kernels, {kept} GB; *dS recomputed*: where there"
            " is no such memory."
        )
    layouts = [row["layout_ms"] for row in shapes if "layout_ms" in row]
    if layouts:
        slowest, target = max(layouts), LAYOUT_MS
        text += (
            f" Layout build: {min(layouts):.3f} to {slowest:.3f} ms ({target.floor} → "
            f"{target.goal}: {reached(slowest, target, smaller=True)})."
        )
    return text


def sweep_table(sweeps: Rows) -> str:
    return markdown(SWEEPS, sweeps)


def window_table(sweeps: Rows) -> str:
    rows = []
    for row in sweeps:
        if "fwd_overhead" in row:
            worst = max(row["fwd_overhead"], row["bwd_overhead"])
            within = "yes" if worst <= WINDOW_OVERHEAD.floor else "no"
            rows.append(row | {"within": within})
    return markdown(WINDOWS, rows)


def first_call_line(calls: Rows) -> str:
    """Median and worst ratio over the never-seen shapes, without and with cudaMalloc."""
    parts = []
    for allocator, name in (("warm", ""), ("empty", "cudaMalloc included, ")):
        ratios = [r["first_over_hundredth"] for r in calls if r["allocator"] == allocator]
        if ratios:
            median, worst = statistics.median(ratios), max(ratios)
            parts.append(f"{name}{median:.2f} × the hundredth (worst {worst:.2f} ×)")
    return f"First call of a never-seen shape: {'; '.join(parts)}."


def first_call_table(calls: Rows) -> str:
    return f"{first_call_line(calls)}\n\n{markdown(FIRST_CALLS, calls)}"


def launch_table(rows: Rows) -> str:
    return markdown(LAUNCH, rows)


def fused_table(rows: Rows) -> str:
    return markdown(FUSED, rows)


def cpu_table(rows: Rows) -> str:
    return markdown(ATTENTION_CPU, rows)


def step_table(result: Row) -> str:
    """A row per batch; what must be reached stands beside what was."""
    rows = []
    for row in result["rows"]:
        limits = STEP_LIMITS.get((row["drafter"], row["case"]), {})
        shown = {key: value for key, value in row.items() if value is not None}
        for name, key, form in (("step", "step_ms", "{:.1f}"), ("peak", "peak_gib", "{:.1f}")):
            if key not in shown:
                continue
            text = form.format(shown[key])
            if name in limits:
                target = limits[name]
                goal = "" if target.goal is None else f" → {target.goal:g}"
                text += f" ({target.floor:g}{goal}: {reached(shown[key], target, smaller=True)})"
            shown[name] = text
        rows.append(shown)
    text = markdown(STEP, rows)
    for walk in result["walks"]:
        text += f"\n\n{walk['steps']} steps of random lengths and anchor counts"
        if "environment" in walk:  # measured by itself
            text += f" (commit `{walk['environment']['commit']}`)"
        if "reserved_growth" in walk:
            text += f": reserved memory grows by {walk['reserved_growth']:.1%}"
        if "first_over_seen" in walk:
            text += (
                f"; a never-seen shape takes {walk['first_over_seen']:.2f} × the same one seen "
                f"again (median; worst {walk['worst_first_over_seen']:.2f} ×)"
            )
        text += "."
    return text


def versions_table(result: Row) -> str:
    """A row per pair of torch and transformers; then which tests failed, and the one extension."""
    pairs = result["pairs"]
    text = markdown(VERSIONS, pairs)
    for pair in pairs:
        if pair["failing"]:
            where = f"torch {pair['torch']}, transformers {pair['transformers']}"
            text += f"\n\nFailed under {where}: {', '.join(pair['failing'])}."
    builds = {pair["md5"] for pair in pairs}
    return f"{text}\n\nMD5 of the extension in all of them: {' and '.join(sorted(builds))}."


def readme_attention(result: Row) -> str:
    text = attention_table(result["shapes"])
    return f"{text} {first_call_line(result['first_calls'])}" if result["first_calls"] else text


def docs_attention(result: Row) -> str:
    parts = []
    if result["sweeps"]:
        base = next(row for row in result["sweeps"] if row["sweep"] == "base")
        parts.append(
            f"One dimension at a time around {base['what']}, B 16, 32/8 heads, D 128, no "
            "window.\n\n" + sweep_table(result["sweeps"])
        )
        parts.append(
            "Windows and in-block causality: time of a visible pair against a layout without "
            "them that has (nearly) the same visible pairs.\n\n" + window_table(result["sweeps"])
        )
    if any("flex_first_s" in row for row in result["shapes"]):
        parts.append(markdown(FLEX_COSTS, result["shapes"]))
    if result["first_calls"]:
        parts.append(first_call_table(result["first_calls"]))
    return "\n\n".join(parts)


FUSED: Columns = [
    ("operator", "op", "{}"),
    ("pass", "what", "{}"),
    ("rows × width", "shape", "{}"),
    ("MB moved", "mb", "{:.0f}"),
    ("ms", "ms", "{:.3f}"),
    ("GB/s", "gb_per_s", "{:.0f}"),
    ("× copy", "over_copy", "{:.2f}"),
    ("plain torch ms", "plain_ms", "{:.3f}"),
    ("× plain", "over_plain", "{:.1f}"),
]
VERSIONS: Columns = [
    (name, name, "{}")
    for name in ("torch", "transformers", "tokenizers", "huggingface_hub")
    + ("passed", "failed", "skipped")
]
DATA: Columns = [(name, name, "{}") for name in ("what", "measured", "required")]

# Result file, title, how to show it. An empty text leaves the section out.
Sections = Sequence[tuple[str, str, Callable[[Row], str]]]
README: Sections = [
    ("attention_h200.json", "Attention, bf16, 32/8 heads, D 128, B 16", readme_attention),
    (
        "attention_cpu.json",
        "Attention on the CPU, 9/3 heads, D 64",
        lambda r: cpu_table(r["shapes"]),
    ),
    (
        "quickstart_cpu.json",
        "Quickstart on the CPU: accepted length",
        lambda r: markdown(QUICKSTART, r["rows"]),
    ),
    (
        "evaluation_h200.json",
        "A drafter of SmolLM2-135M trained on one H200 (`runs/real_result.sh`): accepted length",
        evaluation_table,
    ),
    ("step_h200.json", "Drafter step on the H200", step_table),
    ("step_cpu.json", "Drafter step on the CPU, a small drafter", step_table),
    ("target_h200.json", "Target's forward on the H200, bf16, random weights", target_table),
    ("target_cpu.json", "Target's forward on the CPU, fp32, random weights", target_table),
    ("data_cpu.json", "Data on two cores", lambda r: markdown(DATA, r["rows"])),
]
DOCS: Sections = [
    ("attention_h200.json", "Attention on the H200", docs_attention),
    ("fused_h200.json", "Row-wise operators on the H200", lambda r: fused_table(r["rows"])),
    ("vocabulary_h200.json", "Vocabulary loss on the H200", vocabulary_table),
    (
        "step_h200.json",
        "Where a drafter step's time goes",
        lambda r: kinds_table(r["rows"], "drafter"),
    ),
    ("target_h200.json", "Where a target's time goes", target_details),
    ("training_h200.json", "Held-out blocks of the README's drafter while it trained", runs_table),
    ("ablations_h200.json", "Ways to train it, each for 500 steps", runs_table),
    (
        "ablations_together_h200.json",
        "Ways together, on 8,000 conversations, after 310 of 500 steps (the lease ended)",
        runs_table,
    ),
    ("ablations_cpu.json", "Ways to train the CPU's drafter", runs_table),
    ("pipeline_h200x2_one_to_one.json", "Two ranks over NCCL on two H200s", pipeline_table),
    ("pipeline_h200x2_five_to_three.json", "Eight ranks on two H200s, over gloo", pipeline_table),
    ("pipeline_h200x8_headline.json", "The recipe `eight_gpu` on eight H200s", pipeline_table),
    ("launch_h200.json", "Host time on the H200's machine", lambda r: launch_table(r["rows"])),
    ("launch_cpu.json", "Host time of the CPU operator", lambda r: launch_table(r["rows"])),
    ("versions_cpu.json", "Target and trainer tests, one build of the extension", versions_table),
]
PICTURES = {
    "attention_h200.png": "Attention on the H200: TFLOP/s per shape, ours and the anchors",
    "training_h200.png": "Training on one H200: held-out accepted length and loss",
    "evaluation_h200.png": "What it reaches: accepted length, slots, speed",
    "ablations_h200.png": "Ways to train it: held-out accepted length and loss",
    "attention_cpu.png": "Attention on the CPU: GFLOP/s per shape, ours and SDPA",
}


def describe(result: Row) -> str:
    """Where and when a result was measured, in one line."""
    e = result["environment"]
    machine = e["gpu"] or f"{e['cpu']}, {e['cores']} cores"
    torch = "" if "pairs" in result else f"torch {e['torch']}, "  # each pair has its own
    text = f"{machine}, {e['date'][:10]}, {torch}commit `{e['commit']}`"
    return text + (f"; {result['note']}" if result.get("note") else "")


def numbers(sections: Sections, folder: Path) -> str:
    """The sections whose result file is in `folder`."""
    parts = []
    for name, title, show in sections:
        if (folder / name).exists():
            result = json.loads((folder / name).read_text())
            if text := show(result):
                parts.append(f"**{title}** ({describe(result)})\n\n{text}")
    return "\n\n".join(parts)


def with_numbers(readme: str, folder: Path) -> str:
    """`readme` with the section between the markers replaced."""
    if BEGIN not in readme or END not in readme:
        raise UserError(f"the README has no section between {BEGIN!r} and {END!r}")
    head, rest = readme.split(BEGIN)
    return f"{head}{BEGIN}\n\n{numbers(README, folder)}\n\n{END}{rest.split(END)[1]}"


def docs(folder: Path) -> str:
    """docs/benchmarks.md, which lies beside `folder`'s parent."""
    pictures = [
        f"![{text}](../{folder.name}/{name})"
        for name, text in PICTURES.items()
        if (folder / name).exists()
    ]
    return (
        "\n\n".join(x for x in [DOCS_HEAD.rstrip(), *pictures, numbers(DOCS, folder)] if x) + "\n"
    )


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m dflash_ext.bench tables")
    parser.add_argument("--readme", type=Path, default=Path("README.md"))
    parser.add_argument("--docs", type=Path, default=Path("docs/benchmarks.md"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks"))
    args = parser.parse_args(argv)
    if not args.readme.exists():
        raise UserError(f"{args.readme} does not exist: run this in the repository's root")
    args.readme.write_text(with_numbers(args.readme.read_text(), args.results))
    args.docs.write_text(docs(args.results))
