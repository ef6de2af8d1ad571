"""A process whose CUDA driver is a stub (stub_libcuda.c) that remembers what it was asked.

Each scenario is a fresh process, because the driver is looked up once per process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

PRELUDE = """
import ctypes, json, os, struct, threading
from dflash_ext import _C

class Load(ctypes.Structure):
    _fields_ = [("image", ctypes.c_void_p), ("symbol", ctypes.c_char * 64), ("shared", ctypes.c_int),
                ("completed", ctypes.c_int)]
class Record(ctypes.Structure):
    _fields_ = [("load", ctypes.c_int), ("context", ctypes.c_int), ("grid", ctypes.c_uint),
                ("block", ctypes.c_uint), ("shared", ctypes.c_uint), ("stream", ctypes.c_uint64),
                ("params", ctypes.c_uint64 * 64)]
stub = ctypes.CDLL(os.environ["DFLASH_LIBCUDA"])
stub.stub_load.restype = ctypes.POINTER(Load)
stub.stub_record.restype = ctypes.POINTER(Record)
class Map(ctypes.Structure):
    _fields_ = [("address", ctypes.c_uint64), ("extents", ctypes.c_uint64 * 3), ("strides", ctypes.c_uint64 * 2),
                ("box", ctypes.c_uint * 3), ("rank", ctypes.c_int), ("type", ctypes.c_int), ("swizzle", ctypes.c_int)]
stub.stub_map.restype = ctypes.POINTER(Map)
stub.stub_last_memset.restype = ctypes.c_uint64
def maps():
    found = [stub.stub_map(i).contents for i in range(stub.stub_num_maps())]
    return [dict(address=m.address, extents=list(m.extents)[:m.rank], strides=list(m.strides)[:m.rank - 1],
                 box=list(m.box)[:m.rank], type=m.type, swizzle=m.swizzle) for m in found]

def image_of(load):
    data = ctypes.string_at(load.image, 64)
    if data[:4] != b"\\x7fELF":
        return "ptx"
    flags = struct.unpack("<I", data[48:52])[0]
    return flags >> 8 & 0xFF if data[8] >= 8 else flags & 0xFF   # cubin ABI 8 moved the sm field

NAMES = ("q", "k_ctx", "v_ctx", "k_blk", "v_blk")
def forward(device=0, stream=0, head_dim=128, num_blocks=5, num_ctx=100, num_kv_heads=2, B=16, G=4):
    args = {f"{n}_ptr": 4096 + i for i, n in enumerate(NAMES)}
    args |= {f"{n}_{axis}": 10 * i + j for i, n in enumerate(NAMES) for j, axis in enumerate(("row", "head"))}
    _C.attention_fwd(device=device, stream=stream, head_dim=head_dim, out_ptr=1, lse_ptr=2,
        ctx_start_ptr=3, ctx_end_ptr=4, doc_first_ptr=5, doc_last_ptr=6, num_blocks=num_blocks,
        num_ctx=num_ctx, num_kv_heads=num_kv_heads, B=B, G=G, window=7, causal=1, scale_log2=0.5, **args)
def hopper(kernel, **extra):
    args = {f"{n}_ptr": 4096 * (i + 1) for i, n in enumerate(NAMES)}
    args |= {f"{n}_{axis}": 16 * (i + 1) * (10 if axis == "row" else 1) for i, n in enumerate(NAMES) for axis in ("row", "head")}
    args |= dict(device=0, stream=7, head_dim=128, num_blocks=5, num_ctx=300, num_kv_heads=2, B=8, G=2, window=9, causal=0,
                 scale_log2=0.5, ctx_start_ptr=3, ctx_end_ptr=4, counter_ptr=640)
    getattr(_C, kernel)(**args, **extra)
def last():
    return stub.stub_record(stub.stub_num_records() - 1).contents
"""


def build_stubs(folder: Path) -> dict[str, Path]:
    """The stub driver, "plain" and "cuda_12_4", compiled into `folder`."""
    built = {}
    for name, flags in (("plain", []), ("cuda_12_4", ["-DCUDA_12_4"])):
        built[name] = folder / f"lib{name}.so"
        source = ROOT / "tests" / "stub_libcuda.c"
        command = [
            "cc",
            "-shared",
            "-fPIC",
            "-O1",
            "-pthread",
            *flags,
            str(source),
            "-o",
            str(built[name]),
        ]
        subprocess.run(command, check=True)
    return built


def run(library: Path | str, script: str, **env: object) -> subprocess.CompletedProcess[str]:
    environment = (
        os.environ | {"DFLASH_LIBCUDA": str(library)} | {k: str(v) for k, v in env.items()}
    )
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + script],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def result(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
