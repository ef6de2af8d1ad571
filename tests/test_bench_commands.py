"""Benchmarks: their commands from options to picture, and that what is published was measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_cases import SMALL, small

from dflash_ext.bench import anchors, attention, fused, launch, plot, problem, tables, timing
from dflash_ext.bench.shapes import (
    TARGETS,
    Shape,
)
from dflash_ext.bench.tables import BEGIN, END, with_numbers
from dflash_ext.errors import UserError
from dflash_ext.ops import attention as operator
from dflash_ext.ops import attention_cpu, attention_cuda
from dflash_ext.ops.attention import visible_pairs

ROOT = Path(__file__).parents[1]

# ---- the whole command


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dflash_ext.bench", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_unknown_benchmark_is_one_line() -> None:
    done = run("attentoin")
    assert done.returncode == 2
    assert done.stderr.startswith("error: benchmark 'attentoin' is unknown: expected one of")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds 0: expected at least 1"),
        (["--device", "cpu", "--no-flex"], "--flex and --no-flex are for CUDA"),
        (["--device", "cpu", "--first-calls"], "--first-calls and --no-first-calls are for CUDA"),
    ],
)
def test_bad_options(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        attention.main(arguments)


@pytest.mark.parametrize("main", [attention.main, fused.main, launch.main])
def test_no_gpu_is_said(main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="torch sees no GPU here; use --device cpu"):
        main(["--device", "cuda"])


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG\r\n")


def test_attention_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attention, "CPU_SHAPES", (SMALL,))
    monkeypatch.setattr(anchors, "CPU_PRODUCT", 64)
    kept, picture = tmp_path / "r.json", tmp_path / "r.png"
    attention.main(["--device", "cpu", "--rounds", "1", "--json", str(kept), "--png", str(picture)])
    result = json.loads(kept.read_text())
    assert result["options"] == {"rounds": 1}
    assert [row["dtype"] for row in result["shapes"]] == ["float32", "bfloat16"]
    for row in result["shapes"]:
        assert min(row[k] for k in ("product_gflops", "fwd_gflops", "sdpa_bwd_gflops")) > 0
        ratio = row["fwd_gflops"] / row["sdpa_fwd_gflops"]
        assert row["fwd_over_sdpa"] == pytest.approx(ratio, rel=1e-2)
    assert is_png(picture)
    assert "| A | bfloat16 |" in capsys.readouterr().out


def test_attention_as_on_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The CUDA command from options to picture, its contestants replaced by the CPU's."""

    def on_cpu(shape: Shape, device: str, dtype: torch.dtype) -> problem.Problem:
        assert (device, dtype) == ("cuda", torch.bfloat16)
        return problem.make_problem(shape, "cpu", torch.float32)

    def no_cudnn(length: int) -> dict[str, timing.Run]:
        raise RuntimeError(f"no kernel for {length}\nand a second line")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(attention, "make_problem", on_cpu)
    measured: list[tuple[set[str], int]] = []

    def interleaved(runs: Any, device: str, rounds: int, burst: float) -> dict[str, float]:
        measured.append((set(runs), rounds))
        return timing.interleaved(runs, "cpu", 1)

    monkeypatch.setattr(attention, "interleaved", interleaved)
    monkeypatch.setattr(attention, "CUDA_SHAPES", (SMALL, replace(SMALL, name="B")))
    windowed = replace(SMALL, name="window 20", window=20)
    monkeypatch.setattr(attention, "sweeps", lambda: (("base", SMALL), ("window", windowed)))
    call = {"allocator": "warm", "shape": "s", "first_ms": 1.0, "hundredth_ms": 0.9}
    call |= {"first_over_hundredth": 1.11, "mallocs": 0}
    monkeypatch.setattr(attention, "first_calls", lambda: [call])
    monkeypatch.setattr(anchors, "product_run", lambda device: lambda: None)
    monkeypatch.setattr(anchors, "cudnn_runs", no_cudnn)
    monkeypatch.setattr(
        anchors,
        "flex_runs",
        lambda name, mask, p, layout: (
            {f"{name} {k[5:]}": r for k, r in anchors.sdpa_runs(p, layout).items()},
            {"flex_first_s": 6.0, "flex_mask_ms": 9.0, "flex_difference": 0.003},
        ),
    )
    for module in (operator, attention):
        monkeypatch.setattr(module, "attention_path", lambda t, layout: "hopper")
    # What the path names runs on the CPU here.
    forward, backward = attention_cpu.forward, attention_cpu.backward
    monkeypatch.setattr(attention_cuda, "forward", lambda *a: forward(*a[:-1]))
    monkeypatch.setattr(attention_cuda, "backward", lambda *a: backward(*a[:-2]))
    monkeypatch.setattr(attention_cuda, "images_of_ds", lambda t, layout: None)
    monkeypatch.setattr(problem, "forced_path", lambda name: nullcontext())

    kept = tmp_path / "attention_h200.json"
    attention.main(["--rounds", "2", "--json", str(kept), "--png", str(tmp_path / "a.png")])
    assert is_png(tmp_path / "a.png")
    out = capsys.readouterr().out
    assert "anchor failed: cudnn 4096: RuntimeError: no kernel for 4096\n" in out
    assert "A: hopper, × product fwd" in out
    assert "floor missed: A: fwd_over_product" in out
    result = json.loads(kept.read_text())
    assert result["options"] == dict.fromkeys(("flex", "dense", "sweeps", "first_calls"), True) | {
        "rounds": 2
    }
    assert result["failed"] == [
        f"cudnn {n}: RuntimeError: no kernel for {n}" for n in (4096, 16384)
    ]
    ours = {"product", "fwd", "bwd"}
    paths = {"triton fwd", "triton bwd", "recomputed bwd", "triton recomputed bwd"}
    flex = {f"{name} {p}" for name in ("flex", "flex intervals") for p in ("fwd", "bwd")}
    shape = [(ours | paths, 6), ({"layout"}, 2), ({"fwd", "bwd"} | flex, 2)]
    sweep = [(ours, 2), ({"layout"}, 2)]
    window = ({"fwd", "bwd", "plain fwd", "plain bwd"}, 6)
    assert measured == [*shape, *shape, *sweep, *sweep, window]
    row = result["shapes"][0]
    assert row["pairs"] == int(visible_pairs(small().build_layout()).sum())
    assert {"triton_recomputed_bwd_over_product", "bwd_over_flex", "flex_first_s"} <= row.keys()
    assert "fwd_over_cudnn" not in row
    assert [r["sweep"] for r in result["sweeps"]] == ["base", "window"]
    assert "fwd_overhead" not in result["sweeps"][0]
    assert result["sweeps"][1]["plain_path"] == "hopper"
    # A series of bars that nobody measured is not drawn; the colours stay those of the contestants.
    assert [(b.label, b.colour) for b in plot.bars(result, "fwd")] == [
        ("ours", "C0"),
        ("ours, plain Triton", "C1"),
        ("compiled flex_attention", "C2"),
        ("the same, mask by intervals", "C3"),
    ]

    text = tables.docs(tmp_path)
    assert "| window 20 | hopper |" in text
    assert "First call of a never-seen shape: 1.11 × the hundredth (worst 1.11 ×)." in text
    readme = with_numbers(f"{BEGIN}{END}", tmp_path)
    assert f"({TARGETS['fwd_over_product']['A'].floor:.2f} → 0.90: below floor)" in readme
    assert "| B | backward | hopper |" in readme


def test_wrong_results_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "product_run", lambda device: lambda: None)
    bench = attention.CudaBench(1, lambda result: None, dense=False)

    def wrong() -> dict[str, timing.Run]:
        raise anchors.WrongResult("our attention and flex differ by 0.5")

    with pytest.raises(anchors.WrongResult):
        bench._anchor("flex A", wrong)


def test_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        attention.main(["--device", "cpu", "--png", "x.png"])


def test_plot_command(tmp_path: Path) -> None:
    kept = str(ROOT / "benchmarks" / "attention_cpu.json")
    plot.main([kept, str(tmp_path / "new" / "cpu.png")])
    assert is_png(tmp_path / "new" / "cpu.png")
    for text in ("{", "{}", '{"benchmark": "launch"}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(UserError, match="is no result of"):
            plot.main([str(tmp_path / "bad.json"), str(tmp_path / "x.png")])


def test_launch_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launch.main(["--device", "cpu", "--rounds", "2", "--json", str(tmp_path / "launch_cpu.json")])
    rows = json.loads((tmp_path / "launch_cpu.json").read_text())["rows"]
    times = {row["what"]: row["microseconds"] for row in rows}
    assert list(times) == [
        "empty tensor",
        "one-element add",
        "raw call: attention_cpu_forward",
        "build_layout",
        "autograd forward",
        "autograd forward + backward",
        "autograd forward + backward of nothing",
    ]
    assert min(times.values()) > 0
    runs, _ = launch.launch_runs("cpu")
    for name in ("autograd forward + backward", "autograd forward + backward of nothing"):
        assert len(runs[name]()) == 5  # gradients
    assert "| build_layout |" in capsys.readouterr().out
    assert "| build_layout |" in tables.docs(tmp_path)
    with pytest.raises(UserError, match="expected at least 1"):
        launch.main(["--device", "cpu", "--rounds", "0"])


def test_row_wise_operators_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fused, "CPU", fused.Sizes(8, (64,), (48,), (2,), 64, 2**12))
    kept = tmp_path / "fused_h200.json"
    fused.main(["--device", "cpu", "--rounds", "1", "--json", str(kept)])
    rows = json.loads(kept.read_text())["rows"]
    assert [(r["op"], r["what"]) for r in rows] == [
        ("rms_norm", "forward"),
        ("add_rms_norm", "forward"),
        ("rms_norm", "backward"),
        ("add_rms_norm", "backward"),
        ("add_rms_norm", "backward, norm again"),
        ("swiglu", "forward"),
        ("swiglu", "backward, activation again"),
        ("head_norm_rope", "forward"),
        ("head_norm_rope", "backward"),
    ]
    operand = 8 * 64 * 4  # bytes of one operand of a norm
    assert [r["mb"] * 1e6 for r in rows[:5]] == [n * operand for n in (2, 4, 3, 4, 5)]
    for row in rows:
        assert row["over_copy"] == pytest.approx(row["gb_per_s"] / row["copy_gb_per_s"], rel=2e-3)
    assert "| swiglu | backward, activation again | 8 × 48 |" in capsys.readouterr().out
    assert "| head_norm_rope | forward | 8 × 2 × 64 |" in tables.docs(tmp_path)
    with pytest.raises(UserError, match="expected at least 1"):
        fused.main(["--device", "cpu", "--rounds", "0"])
    real = fused.swiglu.swiglu_forward
    monkeypatch.setattr(
        fused.swiglu, "swiglu_forward", lambda g, u, out: real(g, u, out=out).neg_()
    )
    with pytest.raises(anchors.WrongResult, match="swiglu forward and its composition differ"):
        fused.main(["--device", "cpu", "--rounds", "1"])


def test_once_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_ext.bench import once

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="torch sees none"):
        once.main([])


# ---- what is published


def test_published_numbers_are_the_kept_results() -> None:
    readme = (ROOT / "README.md").read_text()
    assert with_numbers(readme, ROOT / "benchmarks") == readme
    assert tables.docs(ROOT / "benchmarks") == (ROOT / "docs" / "benchmarks.md").read_text()
    for file in (ROOT / "benchmarks").glob("*.json"):
        kept = json.loads(file.read_text())
        assert {"date", "commit", "torch", "cores"} <= kept["environment"].keys(), file.name


def test_tables_command_writes_both_files(tmp_path: Path) -> None:
    readme, docs = tmp_path / "README.md", tmp_path / "benchmarks.md"
    readme.write_text(f"a{BEGIN}{END}b")
    results = str(ROOT / "benchmarks")
    tables.main(["--readme", str(readme), "--docs", str(docs), "--results", results])
    assert readme.read_text() == with_numbers(f"a{BEGIN}{END}b", ROOT / "benchmarks")
    assert docs.read_text() == tables.docs(ROOT / "benchmarks")
    with pytest.raises(UserError, match="does not exist"):
        tables.main(["--readme", str(tmp_path / "none.md")])


def test_readme_without_markers_is_an_error() -> None:
    with pytest.raises(UserError, match="has no section between"):
        with_numbers("# no markers", ROOT / "benchmarks")
    assert with_numbers(f"a{BEGIN}old{END}b", ROOT / "nowhere") == f"a{BEGIN}\n\n\n\n{END}b"


def test_what_was_not_measured_is_a_dash() -> None:
    columns = [("a", "a", "{:.1f}"), ("b", "b", "{}")]
    assert tables.markdown(columns, [{"a": 1.0}]).splitlines()[-1] == "| 1.0 | – |"
