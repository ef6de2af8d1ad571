"""From declarations to C++: the kernels' ids, and one typed launcher per kernel.

Needs no image, so that the C++ compiles beside the kernels. The launchers come from the same
declarations that the compile gates hold the images to.
"""

from __future__ import annotations

from pathlib import Path

from dflash_kernels.spec import TYPES, Computed, Kernel, TensorMap, VectorMap
from dflash_kernels.variants import KERNELS, KEY_TILE

FILES = ("kernel_ids.inc", "launchers.inc")
# C++ type of a host argument -> its Kind in csrc/launchers.h, also the member of its Value.
_KINDS = {"uint64_t": "address", "int32_t": "int32", "float": "float32"}


def encode(name: str, kind: TensorMap | VectorMap) -> str:
    """C++ that encodes a map from host arguments."""
    if isinstance(kind, VectorMap):
        return (
            f"const CUtensorMap {name} = vector_map({kind.tensor}_ptr, {kind.length}, {kind.box});"
        )
    if kind.contiguous:
        strides = f"int64_t({kind.heads}) * {kind.columns}, {kind.columns}"
    else:
        strides = f"{kind.tensor}_row, {kind.tensor}_head"
    return (
        f"const CUtensorMap {name} = rows_map({kind.tensor}_ptr, {kind.rows}, {kind.heads}, "
        f"{kind.columns}, {strides}, {kind.box_rows}, {kind.box_heads});"
    )


def launcher(kernel: Kernel) -> str:
    """The kernel's parameters and its launch function, in a namespace of its own."""
    types = {name: TYPES[kind][1] for name, kind in kernel.host.items()}
    parameters = ", ".join(f'{{"{name}", Kind::{_KINDS[t]}}}' for name, t in types.items())
    made = [
        f"[[maybe_unused]] const {t} {name} = call.values[{i}].{_KINDS[t]};"
        for i, (name, t) in enumerate(types.items())
    ]
    made.append("[[maybe_unused]] const int head_dim = call.head_dim;")
    if any(isinstance(kind, (TensorMap, VectorMap)) for kind in kernel.arguments.values()):
        made.append("const ContextScope scope = enter_device(call.device);")
        made.append("const int64_t unread = 0;")
    values: list[str] = []
    sizes: list[str] = []
    for name, kind in kernel.arguments.items():
        values.append(f"&{name}")
        sizes.append(f"sizeof({name})")
        if isinstance(kind, Computed):
            made.append(f"const int32_t {name} = {kind.expression};")
        elif not isinstance(kind, str):
            made.append(encode(name, kind))
            # Extents and strides follow the map; the build checks that the code reads none.
            values += ["&unread"] * 2 * kind.rank
            sizes += ["4"] * kind.rank + ["8"] * kind.rank
    counters = [name for name, kind in kernel.arguments.items() if kind == "counter*"]
    body = "".join(f"  {line}\n" for line in made)
    arguments = ", ".join(values)
    return f"""
namespace {kernel.name} {{
const Parameter parameters[] = {{{parameters}}};
static_assert(std::size(parameters) <= kMaxParameters);

void launch(const Call& call) {{
{body}  static const size_t sizes[] = {{{", ".join(sizes)}}};
  const void* values[] = {{{arguments}, nullptr, nullptr}};
  dflash::launch(
      KernelId::{kernel.name}, call.device, call.stream, head_dim, values, sizes, std::size(sizes),
      {counters[0] if counters else 0},
      [&]([[maybe_unused]] int64_t tile, [[maybe_unused]] int64_t multiprocessors) -> int64_t {{
        return {kernel.grid};
      }});
}}
}}  // namespace {kernel.name}
"""


def launchers() -> str:
    rows = "".join(
        f'  {{"{k.name}", {k.name}::parameters, std::size({k.name}::parameters), '
        f"{k.name}::launch}},\n"
        for k in KERNELS
    )
    functions = "".join(launcher(k) for k in KERNELS)
    return (
        f"namespace {{\n{functions}\n}}  // namespace\n\n"
        f"const Launcher kLaunchers[] = {{\n{rows}}};\n"
    )


def kernel_ids() -> str:
    ids = ", ".join(k.name for k in KERNELS)
    names = ", ".join(f'"{k.name}"' for k in KERNELS)
    return (
        f"enum class KernelId : int {{ {ids} }};\n"
        f"inline constexpr const char* kKernelNames[] = {{{names}}};\n"
        f"inline constexpr int kNumKernels = {len(KERNELS)};\n"
        f"inline constexpr int kKeyTile = {KEY_TILE};\n"
    )


def write(generated: Path) -> None:
    """A file that stays the same is left alone, so that nothing compiles again."""
    generated.mkdir(parents=True, exist_ok=True)
    for name, text in zip(FILES, (kernel_ids(), launchers()), strict=True):
        file = generated / name
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
