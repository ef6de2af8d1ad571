"""The CUDA launcher against a stub driver: which image, grid, parameters, context, errors, threads.

Each scenario is a fresh process, because the driver is looked up once per process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from stub_driver import PRELUDE, ROOT, build_stubs, result, run
from triton_sources import PYTHON, needs_triton


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build_stubs(tmp_path_factory.mktemp("stub"))


def built() -> list[int]:
    from dflash_ext import _C

    return _C.built_architectures()


def test_launch_passes_grid_block_and_parameters(stub: dict[str, Path]) -> None:
    script = """
stub.stub_expect_params(32)
forward(stream=77)
r = last(); load = stub.stub_load(r.load).contents
params = [p & 0xFFFFFFFF for p in r.params]
print(json.dumps(dict(symbol=load.symbol.decode(), grid=r.grid, block=r.block, shared=r.shared,
    reserved=load.shared, stream=r.stream, context=r.context, params=params[:32], depth=stub.stub_context_depth())))
"""
    r = result(run(stub["plain"], script))
    spec = next(
        v for v in report() if (v["kernel"], v["head_dim"], v["sm"]) == ("attention_fwd", 128, 90)
    )
    assert r["symbol"] == "attention_fwd_kernel"
    rows = 5 * 16 * 4
    assert r["grid"] == -(-rows // spec["tile"]) * 2
    assert r["block"] == spec["threads"]
    assert r["shared"] == r["reserved"] == spec["shared_bytes"]
    assert r["stream"] == 77
    assert r["context"] == 1000
    assert r["depth"] == 0, "the pushed context must be popped again"
    pointers = [4096, 4097, 4098, 4099, 4100, 1, 2, 3, 4, 5, 6]
    strides = [0, 1, 10, 11, 20, 21, 30, 31, 40, 41]
    half = 0x3F000000  # 0.5f
    maps = [0, 0]  # unused by pointer kernels
    sizes = [5, 2, 16, 4, 7, 1]
    assert r["params"] == [*pointers[:5], *maps, *pointers[5:], *strides, *sizes, half, 0, 0]


BF16, FLOAT32, SWIZZLE_128, NO_SWIZZLE = 9, 7, 3, 0  # cuda.h


def row_map(address: int, row: int, head: int, *, G: int = 2) -> dict:
    """What TMA must be told of [40 rows, 2 * G heads, 128] with these strides, 64 rows a box."""
    return {
        "address": address,
        "extents": [128, 2 * G, 40],
        "strides": [2 * head, 2 * row],
        "box": [64, G, 64 // G],
        "type": BF16,
        "swizzle": SWIZZLE_128,
    }


def key_map(address: int, rows: int, row: int, head: int, box: int) -> dict:
    return row_map(address, row, head) | {"extents": [128, 2, rows], "box": [64, 1, box]}


def test_hopper_forward_encodes_its_maps_and_zeroes_its_counter(stub: dict[str, Path]) -> None:
    script = """
stub.stub_expect_params(58)
hopper("hopper_fwd_own32", out_ptr=65536, lse_ptr=11, doc_first_ptr=5, doc_last_ptr=6)
r = last()
print(json.dumps(dict(maps=maps(), memset=stub.stub_last_memset(), memsets=stub.stub_num_memsets(), grid=r.grid,
    block=r.block, symbol=stub.stub_load(r.load).contents.symbol.decode(), depth=stub.stub_context_depth(),
    params=[p & 0xFFFFFFFF for p in r.params][42:58])))
"""
    r = result(run(stub["plain"], script))
    assert r["maps"] == [
        row_map(4096, 160, 16),
        key_map(4096 * 4, 40, 640, 64, 32),
        key_map(4096 * 5, 40, 800, 80, 32),
        key_map(4096 * 2, 300, 320, 32, 128),
        key_map(4096 * 3, 300, 480, 48, 128),
        row_map(65536, 512, 128),  # contiguous: 2 * G heads of 128
    ]
    assert (r["memset"], r["memsets"]) == (640, 1)
    assert r["symbol"] == "hopper_fwd_kernel"
    assert r["block"] == 384
    items = -(-5 * 8 * 2 // 128) * 2
    assert r["grid"] == items < 132
    half = 0x3F000000
    # lse, counter, intervals, document ends; items, blocks, heads, window, causal, log2 of B and G
    assert r["params"] == [11, 640, 3, 4, 5, 6, items, 5, 2, 9, 0, 3, 1, half, 0, 0]
    assert r["depth"] == 0


def test_hopper_gradient_of_keys_walks_context_and_own_tiles(stub: dict[str, Path]) -> None:
    script = """
outs = dict(dk_blk_ptr=1 << 20, dv_blk_ptr=2 << 20, dk_ctx_ptr=3 << 20, dv_ctx_ptr=4 << 20)
hopper("hopper_bwd_dkv", dout_ptr=8192, lse_ptr=16384, delta_ptr=32768, ranges_ptr=8, scale=2.0, **outs)
print(json.dumps(dict(maps=maps(), grid=last().grid)))
"""
    r = result(run(stub["plain"], script))
    vector = {"extents": [5 * 8 * 2 * 2], "strides": [], "box": [64]}
    vector |= {"type": FLOAT32, "swizzle": NO_SWIZZLE}
    assert r["maps"] == [
        row_map(4096, 160, 16),
        row_map(8192, 512, 128),
        {"address": 16384, **vector},
        {"address": 32768, **vector},
        key_map(4096 * 4, 40, 640, 64, 64),
        key_map(4096 * 5, 40, 800, 80, 64),
        key_map(4096 * 2, 300, 320, 32, 64),
        key_map(4096 * 3, 300, 480, 48, 64),
        key_map(1 << 20, 40, 256, 128, 64),
        key_map(2 << 20, 40, 256, 128, 64),
        key_map(3 << 20, 300, 256, 128, 64),
        key_map(4 << 20, 300, 256, 128, 64),
    ]
    assert r["grid"] == (-(-300 // 128) + 1) * 2


@needs_triton
def test_boxes_are_the_tiles_that_the_code_copies(stub: dict[str, Path]) -> None:
    """Of plain Triton's images with maps; G 12 is three groups of four heads."""
    script = """
from dflash_kernels.variants import kernel_named
sizes = dict(num_blocks=5, num_ctx=300, num_kv_heads=2, B=8, G=12)
boxes = []
for row in json.loads(_C.build_report()):
    if row["kernel"].startswith("attention_tma_"):
        host = kernel_named(row["kernel"]).host
        before = stub.stub_num_maps()
        getattr(_C, row["kernel"])(device=0, stream=0, head_dim=row["head_dim"], **{n: sizes.get(n, 4096) for n in host})
        boxes.append([m["box"] for m in maps()[before:]])
print(json.dumps(boxes))
"""
    made = result(run(stub["plain"], script, PYTHONPATH=PYTHON))
    images = [row for row in report() if row["kernel"].startswith("attention_tma_")]
    assert {row["head_dim"] for row in images} == {64, 128, 256}
    for row, boxes in zip(images, made, strict=True):
        tile = row["constants"]
        keys, rows = [64, 1, tile["BN"]], [64, 4, tile.get("M", 0) // 4]
        of_keys = row["kernel"].endswith(("fwd", "bwd_dq"))
        assert boxes == 2 * [keys if of_keys else rows], row["kernel"]


def test_dq_of_kept_scores_reads_images_of_head_groups(stub: dict[str, Path]) -> None:
    """G 6 is three groups of two heads; 70 images each in front of those of own keys."""
    script = """
stub.stub_expect_params(49)
_C.attention_bwd_dq_kept(device=0, stream=0, head_dim=128, k_blk_ptr=4096, k_blk_row=256, k_blk_head=128,
    k_ctx_ptr=8192, k_ctx_row=512, k_ctx_head=128, images_ptr=1 << 20, dq_ptr=2 << 20, counter_ptr=640,
    ctx_start_ptr=3, ctx_end_ptr=4, doc_first_ptr=5, doc_last_ptr=6, ranges_ptr=7, seen_ptr=8, num_blocks=5,
    num_ctx=300, num_kv_heads=2, head_images=75, ctx_images=70, window=9, causal=1, scale=0.5, B=8, G=6)
r = last()
print(json.dumps(dict(maps=maps(), grid=r.grid, symbol=stub.stub_load(r.load).contents.symbol.decode(),
    memset=stub.stub_last_memset(), params=[p & 0xFFFFFFFF for p in r.params][28:49])))
"""
    r = result(run(stub["plain"], script))
    images = {"address": 1 << 20, "extents": [64, 1, 75 * 6 * 64], "strides": [128, 128]}
    images |= {"box": [64, 1, 64], "type": BF16, "swizzle": SWIZZLE_128}
    dq = row_map(2 << 20, 12 * 128, 128) | {"extents": [128, 12, 40], "box": [64, 2, 32]}
    own = key_map(4096, 40, 256, 128, 64)
    assert r["maps"] == [own, key_map(8192, 300, 512, 128, 64), images, dq]
    assert r["symbol"] == "attention_bwd_dq_kept_kernel"
    assert r["memset"] == 640
    items = -(-5 * 8 * 2 // 128) * 2 * 3
    assert r["grid"] == items
    half = 0x3F000000
    # counter, intervals, document ends, tables; items, blocks, tokens, head groups, groups a
    # key-value head, images; window, causal, log2 of B and of a group's heads
    numbers = [items, 5, 300, 6, 3, 75, 70, 9, 1, 3, 1, half]
    assert r["params"] == [640, 3, 4, 5, 6, 7, 8, *numbers, 0, 0]


def test_maps_are_encoded_in_a_thread_without_a_context(stub: dict[str, Path]) -> None:
    """As in autograd's threads: the launcher brings the context for the encoding too."""
    script = """
errors = []
def work():
    try:
        hopper("hopper_fwd_own32", out_ptr=65536, lse_ptr=11, doc_first_ptr=5, doc_last_ptr=6)
        errors.append(stub.stub_context_depth())
    except Exception as e:
        errors.append(repr(e))
thread = threading.Thread(target=work); thread.start(); thread.join()
print(json.dumps(dict(errors=errors, maps=stub.stub_num_maps(), records=stub.stub_num_records())))
"""
    assert result(run(stub["plain"], script)) == {"errors": [0], "maps": 6, "records": 1}


def test_persistent_kernels_start_one_program_a_multiprocessor(stub: dict[str, Path]) -> None:
    script = """
args = {f"{n}_ptr": 4096 * (i + 1) for i, n in enumerate(NAMES)}
args |= {f"{n}_{axis}": 128 for n in NAMES for axis in ("row", "head")}
_C.hopper_fwd_own16(device=0, stream=0, head_dim=64, num_blocks=5000, num_ctx=300, num_kv_heads=8, B=16, G=4,
    window=9, causal=0, scale_log2=0.5, ctx_start_ptr=3, ctx_end_ptr=4, counter_ptr=640, out_ptr=65536, lse_ptr=11,
    doc_first_ptr=5, doc_last_ptr=6, **args)
print(json.dumps(dict(grid=last().grid)))
"""
    assert result(run(stub["plain"], script))["grid"] == 132


def test_hopper_kernels_exist_for_sm_90_alone(stub: dict[str, Path]) -> None:
    script = """
hopper("hopper_fwd_own32", out_ptr=65536, lse_ptr=11, doc_first_ptr=5, doc_last_ptr=6)
"""
    if 100 not in built():
        pytest.skip("built without sm_100 (DFLASH_SM)")
    done = run(stub["plain"], script, STUB_SM=100)
    assert "hopper_fwd_own32: no kernel for head_dim 128 on Stub GPU (sm_100)" in done.stderr


def report() -> list[dict]:
    from dflash_ext import _C

    return json.loads(_C.build_report())


@pytest.mark.parametrize(
    ("sm", "image"),
    [
        (80, 80),
        (86, 86),
        (87, 86),
        (89, 86),
        (90, 90),
        (100, 100),
        (103, "ptx"),
        (120, 120),
        (121, "ptx"),
    ],
)
def test_each_device_gets_its_image(stub: dict[str, Path], sm: int, image: int | str) -> None:
    if image != "ptx" and image not in built():
        pytest.skip(f"built without sm_{image} (DFLASH_SM)")
    script = (
        "forward(); print(json.dumps(dict(image=image_of(stub.stub_load(last().load).contents))))"
    )
    assert result(run(stub["plain"], script, STUB_SM=sm))["image"] == image


def test_a_device_with_no_image_is_named(stub: dict[str, Path]) -> None:
    done = run(stub["plain"], "forward()", STUB_SM=75)
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert "no kernel image for Stub GPU (sm_75): built are" in message
    assert "DFLASH_SM" in message


def test_images_load_once_per_device_under_racing_threads(stub: dict[str, Path]) -> None:
    script = """
barrier = threading.Barrier(16); failed = []
def work(i):
    barrier.wait()
    try:
        for step in range(50):
            forward(device=i % 2, stream=i + 1, num_blocks=i + 1)
        assert stub.stub_context_depth() == 0
    except Exception as e:
        failed.append(repr(e))
threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
[t.start() for t in threads]; [t.join() for t in threads]
records = [stub.stub_record(i).contents for i in range(stub.stub_num_records())]
wrong = sum(r.context != 1000 + (r.stream - 1) % 2 or r.grid != -(-int(r.stream) * 64 // 128) * 2 for r in records)
print(json.dumps(dict(failed=failed, records=len(records), wrong=wrong, loads=stub.stub_num_loads())))
"""
    r = result(run(stub["plain"], script))
    images = sum(v["sm"] == 90 for v in report())
    assert r == {"failed": [], "records": 16 * 50, "wrong": 0, "loads": 2 * images}


def test_warmup_loads_everything_and_launches_load_nothing(stub: dict[str, Path]) -> None:
    script = """
_C.warmup(1); before = stub.stub_num_loads(); forward(device=1)
print(json.dumps(dict(before=before, after=stub.stub_num_loads(), device=_C.describe_device(1))))
"""
    r = result(run(stub["plain"], script))
    assert r["before"] == r["after"] == sum(v["sm"] == 90 for v in report())
    assert r["device"] == "Stub GPU (sm_90): sm_90"


def test_empty_problem_launches_nothing(stub: dict[str, Path]) -> None:
    script = "forward(num_blocks=0); print(json.dumps(dict(records=stub.stub_num_records())))"
    assert result(run(stub["plain"], script))["records"] == 0


@pytest.mark.parametrize(
    ("script", "env", "message"),
    [
        ("forward(head_dim=96)", {}, "attention_fwd: no kernel for head_dim 96 on Stub GPU (sm_90)"),
        ("forward(device=2)", {}, "no CUDA device 2: the driver has 2"),
        ("forward(num_blocks=2**31 - 1)", {}, "a launch takes at most 2^31 - 1"),
        ("forward()", {"STUB_FAIL": "cuLaunchKernelEx"}, "launching attention_fwd on Stub GPU (sm_90)"),
        ("forward()", {"STUB_FAIL": "cuLibraryLoadData"}, "loading attention_fwd for Stub GPU (sm_90)"),
        ("forward()", {"STUB_FAIL": "cuInit"}, "the NVIDIA driver did not start"),
    ],
)  # fmt: skip
def test_errors_are_one_line(stub: dict[str, Path], script: str, env: dict, message: str) -> None:
    done = run(stub["plain"], script, **env)
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("RuntimeError: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_row": None}, "swiglu_fwd: needs gate_row"),
        ({"depth": 3}, "swiglu_fwd: does not take depth"),
        ({"rows": 2**31}, "swiglu_fwd: rows is not an int32"),
        ({"rows": 1.5}, "swiglu_fwd: rows is not an int32"),
        ({"gate_ptr": -1}, "swiglu_fwd: gate_ptr is not an address"),
        ({"gate_ptr": 2**64}, "swiglu_fwd: gate_ptr is not an address"),
        ({"eps": "small"}, "head_norm_rope_fwd: eps is not a float"),
    ],
)
def test_arguments_are_checked_before_any_driver_is_asked(change: dict, message: str) -> None:
    from dflash_ext import _C

    swiglu = dict.fromkeys(("gate_ptr", "up_ptr", "out_ptr"), 4096)
    swiglu |= dict.fromkeys(("gate_row", "up_row", "out_row", "width", "rows"), 8)
    rope = dict.fromkeys(("x_ptr", "weight_ptr", "cos_ptr", "sin_ptr", "out_ptr"), 4096)
    rope |= dict.fromkeys(("x_row", "x_head", "out_row", "out_head", "table_row"), 8)
    rope |= {"rows": 1, "heads": 1, "group": 1, "normed": 1}
    name = message.split(":")[0]
    given = (swiglu if name == "swiglu_fwd" else rope) | change
    arguments = {key: value for key, value in given.items() if value is not None}
    with pytest.raises(TypeError) as error:
        getattr(_C, name)(device=0, stream=0, head_dim=0, **arguments)
    assert str(error.value) == message


def test_parameter_size_mismatch_stops_the_launch(stub: dict[str, Path]) -> None:
    done = run(stub["cuda_12_4"], "forward()", STUB_PARAM_BYTES=8)
    assert "parameter 5 has 8 bytes, the launcher passes 4" in done.stderr.splitlines()[-1]


def test_every_image_is_loaded_before_the_first_launch(stub: dict[str, Path]) -> None:
    """CUDA loads lazily: a kernel's first launch would load it, and wait for an idle device."""
    script = """
_C.warmup(0)
print(json.dumps([stub.stub_load(i).contents.completed for i in range(stub.stub_num_loads())]))
"""
    completed = result(run(stub["cuda_12_4"], script))
    assert len(completed) > 30
    assert set(completed) == {1}
    assert run(stub["cuda_12_4"], "_C.warmup(0)", STUB_FAIL="cuFuncLoad").returncode == 0


def test_without_a_driver_import_works_and_launch_says_so() -> None:
    # The prelude opens the stub for its records; here there is nothing to open.
    calls = (
        PRELUDE[: PRELUDE.index("stub = ")]
        + PRELUDE[PRELUDE.index("NAMES =") : PRELUDE.index("def last")]
    )
    env = os.environ | {"DFLASH_LIBCUDA": "/nonexistent/libcuda.so"}
    code = calls + "forward()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert (
        "no NVIDIA driver: /nonexistent/libcuda.so could not be loaded"
        in done.stderr.splitlines()[-1]
    )


@pytest.mark.parametrize("logits", ["f32", "bf16"])
def test_vocabulary_kernels_take_a_program_a_row(stub: dict[str, Path], logits: str) -> None:
    """Per-row values may lie anywhere; the gradient lies over the logits."""
    script = f"""
rows = dict(device=1, stream=5, head_dim=0, logits_ptr=4096, labels_ptr=8, lse_ptr=12, at_label_ptr=20, row_stride=151936,
            V=151931, num_rows=30720)
stub.stub_expect_params(10)
_C.vocabulary_statistics_{logits}(prediction_ptr=24, rank_ptr=40, **rows)
s = last(); first = dict(grid=s.grid, block=s.block, context=s.context, symbol=stub.stub_load(s.load).contents.symbol.decode(),
                         params=[p & 0xFFFFFFFF for p in s.params][:10])
stub.stub_expect_params(10)
_C.vocabulary_gradient_{logits}(grad_ptr=4096, weights_ptr=28, **rows)
g = last(); count = stub.stub_num_records()
_C.vocabulary_gradient_{logits}(grad_ptr=4096, weights_ptr=28, **(rows | dict(num_rows=0)))
print(json.dumps(dict(first=first, grid=g.grid, params=[p & 0xFFFFFFFF for p in g.params][:10],
                      launched_for_no_rows=stub.stub_num_records() - count)))
"""
    r = result(run(stub["plain"], script))
    threads = {v["kernel"]: v["threads"] for v in report() if v["kernel"].startswith("vocabulary")}
    assert r["first"] == {
        "grid": 30720,
        "block": threads[f"vocabulary_statistics_{logits}"],
        "context": 1001,
        "symbol": "vocabulary_statistics_kernel",
        "params": [4096, 8, 12, 20, 24, 40, 151936, 151931, 0, 0],
    }
    assert r["grid"] == 30720
    assert r["params"] == [4096, 4096, 8, 12, 20, 28, 151936, 151931, 0, 0]
    assert r["launched_for_no_rows"] == 0


@pytest.mark.parametrize("loss", ["kl", "lk"])
def test_kernels_of_losses_against_the_target(stub: dict[str, Path], loss: str) -> None:
    script = f"""
stub.stub_expect_params(11)
_C.vocabulary_{loss}(device=0, stream=5, head_dim=0, logits_ptr=4096, teacher_ptr=8192, grad_ptr=4096, lse_ptr=4,
    teacher_lse_ptr=12, weights_ptr=20, loss_ptr=28, row_stride=48, V=33, num_rows=7)
r = last()
print(json.dumps(dict(grid=r.grid, symbol=stub.stub_load(r.load).contents.symbol.decode(),
                      params=[p & 0xFFFFFFFF for p in r.params][:11])))
"""
    assert result(run(stub["plain"], script)) == {
        "grid": 7,
        "symbol": f"vocabulary_{loss}_kernel",
        "params": [4096, 8192, 4096, 4, 12, 20, 28, 48, 33, 0, 0],
    }
