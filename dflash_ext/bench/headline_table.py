"""How the headline run of `bench pipeline` is shown: what was measured beside what was wanted."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_ext.bench.markdown import Columns, Row, markdown

# Of issue 9 and requirements 15 and 19.
PACE_GOAL, MEMORY_GOAL, FIRST_STEP_GOAL, DEATH_GOAL = 0.95, 0.01, 5.0, 60.0

MEASURED: Columns = [(name, name, "{}") for name in ("what", "measured", "goal")]
KILLS: Columns = [
    ("killed", "killed", "{}"),
    ("in", "at", "{}"),
    (f"until all had ended, s (at most {DEATH_GOAL:.0f})", "seconds_until_all_ended", "{:.1f}"),
    ("exit code", "exit_code", "{}"),
    ("of them with 0 (none)", "exited_with_0", "{}"),
    ("went on from step", "resumed_from", "{}"),
    ("launch to first step, s", "seconds_to_first_step", "{:.0f}"),
]


def headline_table(headline: Row) -> str:
    """All pieces that there are, whichever call measured them."""
    parts = [
        f"{headline['targets']} targets and {headline['drafters']} drafters, "
        f"{headline['shape']}, batches of {headline['token_budget']:,} tokens, up to "
        f"{headline['anchors_per_sequence']} anchors a document."
    ]
    if rows := [*_alone(headline.get("alone", {})), *_pace(headline), *_losses(headline)]:
        parts.append(markdown(MEASURED, rows))
    if launches := headline.get("kills", {}).get("launches"):
        parts.append(f"{_uses(headline['kills'])}\n\n{markdown(KILLS, launches)}")
    parts += [
        f"{name}: {headline[name]['error']}"
        for name in ("alone", "pace", "kills", "losses")
        if "error" in headline.get(name, {})
    ]
    return "\n\n".join(parts)


def _row(what: str, measured: str, goal: str = "") -> Row:
    return {"what": what, "measured": measured, "goal": goal}


def _told(value: float, form: str, goal: float, *, smaller: bool = True) -> tuple[str, str]:
    """(the value and whether it reached the goal, the goal)."""
    reached = value <= goal if smaller else value >= goal
    sign = "at most" if smaller else "at least"
    return f"{form.format(value)} ({'reached' if reached else 'missed'})", (
        f"{sign} {form.format(goal)}"
    )


def _alone(alone: Row) -> list[Row]:
    if "drafters_balance" not in alone:
        return []
    rows = []
    for side in ("target", "drafter"):
        a_step, a_batch = (alone[f"{side}_seconds_a_{unit}"] for unit in ("step", "batch"))
        rows.append(
            _row(f"a step of the {side}s alone, s (a batch)", f"{a_step:.3f} ({a_batch:.3f})")
        )
    rows.append(
        _row(
            "of their pace the drafters' unequal batches allow", f"{alone['drafters_balance']:.3f}"
        )
    )
    rows.append(_row("best split by these times", alone["best_split"]))
    return rows


def _pace(headline: Row) -> list[Row]:
    pace, rows = headline.get("pace", {}), []
    if "share_of_slower_side" in pace:
        share = _told(pace["share_of_slower_side"], "{:.3f}", PACE_GOAL, smaller=False)
        rows.append(_row(f"pace, of the {pace['slower_side']}s' alone", *share))
    for what, key, form in (
        ("Ktok/s", "ktok_s", "{:.1f}"),
        ("targets wait", "wait_target", "{:.1%}"),
        ("drafters wait for a capture", "wait_drafter", "{:.1%}"),
        ("drafters wait for a hand-over", "wait_transfer", "{:.1%}"),
        ("MFU, targets", "mfu_target", "{:.2f}"),
        ("MFU, drafters", "mfu_drafter", "{:.2f}"),
        ("features handed over, GB/s in all", "handed_over_gb_s", "{:.2f}"),
    ):
        if key in pace:
            rows.append(_row(what, form.format(pace[key])))
    for role in ("target", "drafter"):
        if spreads := [row["spread"] for row in pace.get("memory", []) if row["role"] == role]:
            flat = _told(max(spreads), "{:.2%}", MEMORY_GOAL)
            rows.append(_row(f"reserved memory varies, {role}s", *flat))
    return rows + _start(pace.get("seconds", {}))


def _start(seconds: Row) -> list[Row]:
    rows = []
    if "from_launch_to_first_step" in seconds:
        rows.append(_row("launch to first step, s", f"{seconds['from_launch_to_first_step']:.1f}"))
    if "from_loaded_to_first_step" in seconds:
        told = _told(seconds["from_loaded_to_first_step"], "{:.1f}", FIRST_STEP_GOAL)
        rows.append(_row("models loaded to first step, s", *told))
    for what, key in (("longest rehearsal", "rehearsal"), ("first step itself", "first_step")):
        if key in seconds:
            rows.append(_row(f"the {what}, s", f"{seconds[key]:.1f}"))
    return rows


def _losses(headline: Row) -> list[Row]:
    losses = headline.get("losses", {})
    if "largest_relative_difference" not in losses:
        return []
    steps = len(losses["split_losses"])
    same = "the same" if losses["same_blocks"] else "NOT the same"
    return [
        _row(
            f"losses of {steps} steps, largest relative difference from 1:1 (blocks: {same})",
            f"{losses['largest_relative_difference']:.1e}",
        )
    ]


def _uses(kills: Row) -> str:
    if "as_planned" not in kills:
        return f"{kills['samples']} samples, an epoch with two kills."
    same = "as planned" if kills["as_planned"] else "NOT as planned"
    uses: Sequence[int] = kills["uses_of_each_sample"]
    return (
        f"{kills['samples']} samples, an epoch of {kills['planned_steps']} steps with two kills: "
        f"uses of each {uses}, {same}."
    )
