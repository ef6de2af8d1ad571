"""The vocabulary loss's kernels by Triton's interpreter, and behind the operator and the loss.

The wrapper's own launches are run by the interpreter on the CPU, so that its arguments are tested
with the kernels. Interpreted bf16 is only converted and compared here, never multiplied.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
from test_soft_labels import NAIVE
from torch import Tensor
from triton_sources import compiling, skip_module_without_triton

skip_module_without_triton()

from dflash_kernels.variants import kernel_named  # noqa: E402

from dflash_ext.loss import LOSSES, dpace_weights, vocabulary_loss  # noqa: E402
from dflash_ext.ops import soft_labels  # noqa: E402
from dflash_ext.ops import vocabulary as operator  # noqa: E402
from dflash_ext.ops.soft_labels import Chunk  # noqa: E402
from dflash_ext.ops.vocabulary import Statistics, new_statistics  # noqa: E402

STATISTICS_TILE, GRADIENT_TILE = dict(C=16, U=2, STAGES=1), dict(TILE=32)


@pytest.fixture
def interpreted(monkeypatch):
    """The CUDA path of the operator, its launches interpreted; yields the kernels' names."""
    launched: list[str] = []

    def launch(name: str, tensors: dict[str, Tensor]) -> None:
        launched.append(name)
        declared = kernel_named(name)
        logits = tensors["logits"]
        numbers = {"row_stride": logits.stride(0), "V": logits.shape[1]}
        given = {f"{n}_ptr": x for n, x in tensors.items()} | numbers
        tile = STATISTICS_TILE if "statistics" in name else GRADIENT_TILE
        if logits.shape[0]:
            declared.fn[(logits.shape[0],)](*[given[n] for n in declared.arguments], **tile)

    for module in (operator, soft_labels):
        monkeypatch.setattr(module, "by_kernel", lambda device: True)
        monkeypatch.setattr(module, "launch", launch)
    return launched


def aligned(values: Tensor, spare: int = 0) -> Tensor:
    """The same rows where the kernels may read them, NaN around them."""
    rows, V = values.shape
    width = -(-V // operator.ROW_ALIGNMENT) * operator.ROW_ALIGNMENT + spare
    buffer = torch.full((rows, width), math.nan, dtype=values.dtype)
    buffer[:, :V] = values
    return buffer[:, :V]


def nan_statistics(rows: int) -> Statistics:
    stats = new_statistics(rows, torch.device("cpu"))
    for x in stats:
        x.fill_(-7)
    return stats


SIZES = [1, 33, 64, 101]
"""Less than a tile of 32, a tile and one, whole tiles, several and a tail."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("V", SIZES)
def test_statistics_equal_fp64(interpreted, V, dtype):
    torch.manual_seed(V)
    logits = aligned((torch.randn(2, V) * 6).to(dtype), spare=16)
    labels = torch.randint(V, (2,))
    stats = nan_statistics(2)
    operator.vocabulary_statistics(logits, labels, stats)
    truth = operator.statistics_reference(logits.double(), labels)
    torch.testing.assert_close(stats.lse.double(), truth.lse, rtol=1e-6, atol=1e-6)
    assert torch.equal(stats.at_label.double(), truth.at_label)
    assert torch.equal(stats.prediction, truth.prediction)
    assert torch.equal(stats.rank, truth.rank)
    assert interpreted == [f"vocabulary_statistics_{operator.LOGITS_DTYPES[dtype]}"]


def test_ties_take_the_lowest_index(interpreted):
    """Equal largest logits in one tile, in another column or tile, everywhere; and -0 beside 0."""
    V, rows = 80, []
    for places in ([3, 19], [70, 5], [79], list(range(V))):
        row = torch.linspace(-3, -1, V)
        row[places] = 2.0
        rows.append(row)
    zeros = torch.full((V,), -1.0)
    zeros[[50, 66]] = torch.tensor([-0.0, 0.0])
    logits = aligned(torch.stack([*rows, zeros]))
    stats = nan_statistics(len(logits))
    operator.vocabulary_statistics(logits, torch.tensor([19, 0, 79, 7, 66]), stats)
    assert stats.prediction.tolist() == [3, 5, 79, 0, 50]
    assert torch.equal(stats.prediction, logits.argmax(1))
    assert stats.rank.tolist() == [0, V - 1, 0, 0, 0]  # label 0 of row 1 is its smallest


def test_extreme_and_broken_rows(interpreted):
    """Logits far outside exp's range are exact; what is not finite shows in the lse."""
    V = 40
    logits = torch.randn(5, V)
    logits[0] += 3e4
    logits[1] -= 3e4
    logits[2, 1:] = -math.inf
    logits[3] = math.nan
    logits[4, 7] = math.nan
    stats = nan_statistics(5)
    operator.vocabulary_statistics(aligned(logits), torch.zeros(5, dtype=torch.int64), stats)
    truth = operator.statistics_reference(logits[:3].double(), torch.zeros(3, dtype=torch.int64))
    torch.testing.assert_close(stats.lse[:3].double(), truth.lse, rtol=1e-7, atol=1e-7)
    assert torch.equal(stats.prediction[:3], truth.prediction)
    assert stats.lse[3:].isnan().all()
    assert ((stats.prediction >= 0) & (stats.prediction < V)).all()


@pytest.mark.parametrize(
    ("dtype", "V"), [*((torch.float32, V) for V in SIZES), (torch.bfloat16, 33)], ids=str
)
def test_gradient_over_its_own_logits(interpreted, dtype, V):
    torch.manual_seed(V)
    before = (torch.randn(2, V) * 4).to(dtype)
    logits = aligned(before, spare=16)
    labels, weights = torch.randint(V, (2,)), torch.rand(2) + 0.1
    stats = nan_statistics(2)
    operator.vocabulary_statistics(aligned(before.float()), labels, stats)
    truth = operator.gradient_reference(before.double(), labels, weights.double())
    grad = operator.vocabulary_gradient_(logits, labels, stats, weights, torch.bfloat16)
    assert interpreted[-1] == f"vocabulary_gradient_{operator.LOGITS_DTYPES[dtype]}"
    assert grad.data_ptr() == logits.data_ptr()
    assert grad.shape == (2, V)
    assert grad.dtype == torch.bfloat16
    # The interpreter cuts bf16 instead of rounding it, so its unit is twice the GPU's.
    assert ((grad.double() - truth).abs() <= 1.01 * 2**-7 * truth.abs() + 1e-7).all()
    # Nothing behind the row is written.
    spare = logits.as_strided((2, logits.stride(0) - V), logits.stride(), V)
    assert spare.isnan().all()


def test_gradient_in_fp16_is_rounded_once(interpreted):
    """Where the interpreter is exact, the arithmetic is too."""
    torch.manual_seed(0)
    before, labels, weights = torch.randn(2, 101) * 4, torch.randint(101, (2,)), torch.rand(2)
    logits = aligned(before)
    stats = nan_statistics(2)
    operator.vocabulary_statistics(aligned(before), labels, stats)
    grad = operator.over(logits, torch.float16)
    tensors = {"logits": logits, "grad": grad, "labels": labels, "weights": weights}
    tensors |= {"lse": stats.lse, "at_label": stats.at_label}
    operator.launch("vocabulary_gradient_f32", tensors)
    truth = operator.gradient_reference(before.double(), labels, weights.double())
    assert ((grad.double() - truth).abs() <= 1.01 * 2**-11 * truth.abs() + 1e-7).all()


def test_tiles_never_overwrite_what_is_still_to_be_read():
    """The order that the kernel's docstring proves, for every V: bytes of fp32 logits and grads."""
    TILE = kernel_named("vocabulary_gradient_f32").choices[0]["TILE"]
    assert kernel_named("vocabulary_gradient_bf16").choices[0]["TILE"] == TILE
    for logit_bytes in (4, 2):
        for tile in range(262_144 // TILE + 2):
            write_end = (tile + 1) * TILE * 2
            next_read = (tile + 1) * TILE * logit_bytes
            assert write_end <= next_read


def test_a_barrier_stands_between_reads_and_writes_in_the_machine_code(tmp_path):
    """Warps of a program run apart: without it one could write where another has not read."""
    names = ["vocabulary_gradient_f32", "vocabulary_kl", "vocabulary_lk"]
    script = (
        "from dflash_kernels import compile as c, variants\n"
        f"for name in {names}:\n"
        "    variant = variants.Variant(variants.kernel_named(name), 0, 90)\n"
        "    image = c.compile_variant(variant).cubin\n"
        "    print('=', name, c.cuobjdump(image, '-sass'))"
    )
    done = compiling(script, HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    for listing in done.stdout.split("= vocabulary_")[1:]:
        order = re.findall(r"\b(LDG|BAR|STG)\b[.\w]*", listing)
        text = "".join({"LDG": "r", "BAR": "b", "STG": "w"}[x] for x in order)
        # Whole tiles, the tail, a row's own values; loads may move up, writes past no barrier.
        assert len(re.findall("rb+w", text)) >= 2
        assert "rw" not in text


@pytest.mark.parametrize("kind", NAIVE)
@pytest.mark.parametrize("V", [33, 101])
def test_losses_against_the_target_and_their_gradient_in_place(interpreted, kind, V):
    torch.manual_seed(V)
    logits, teacher = torch.randn(2, 2, V) * 3
    weights = torch.rand(2) + 0.1
    mine, theirs = aligned(logits), aligned(teacher)
    lse, teacher_lse = operator.row_lse(mine), operator.row_lse(theirs)
    chunk = Chunk(mine, lse, theirs, teacher_lse, weights)
    loss, grad = LOSSES[kind].against_target(chunk, torch.bfloat16)
    assert interpreted == ["vocabulary_statistics_f32"] * 2 + [f"vocabulary_{kind}"]
    x = logits.double().requires_grad_()
    truth = NAIVE[kind](x, teacher.double())
    (truth * weights).sum().backward()
    torch.testing.assert_close(loss.double(), truth.detach(), rtol=1e-5, atol=1e-6)
    assert grad.data_ptr() == mine.data_ptr()
    # Cut, not rounded, to bf16; differences of probabilities carry those' own rounding.
    assert ((grad.double() - x.grad).abs() <= 1.01 * 2**-7 * x.grad.abs() + 1e-6).all()
    assert torch.equal(theirs, teacher)


@pytest.mark.parametrize("kind", ["ce", "dpace"])
def test_the_loss_by_kernels_is_the_loss(interpreted, kind):
    """Statistics, weights between, gradient, second product: on bf16 rows, against fp64."""
    torch.manual_seed(0)
    sizes, H, V = [3, 0, 1, 4], 24, 75
    hidden, head = torch.randn(8, H).bfloat16(), (torch.randn(V, H) * 0.5).bfloat16()
    labels, weights = torch.randint(V, (8,)), torch.rand(8) + 0.1
    x = hidden.clone().requires_grad_()
    out = vocabulary_loss(x, head, labels, weights, rows_per_block=sizes, kind=kind, chunk_rows=4)
    out.numerator.backward()
    assert interpreted == ["vocabulary_statistics_f32", "vocabulary_gradient_f32"] * 2
    logits = (hidden @ head.T).double()  # the CPU's product rounds to bf16
    truth = operator.statistics_reference(logits, labels)
    log_p = truth.at_label - truth.lse
    torch.testing.assert_close(out.cross_entropy.double(), -log_p, rtol=1e-5, atol=1e-5)
    assert torch.equal(out.prediction, truth.prediction)
    assert torch.equal(out.rank, truth.rank)
    if kind == "dpace":
        weights = dpace_weights(log_p.exp().float(), [3, 1, 4], 0.5)
    grad = operator.gradient_reference(logits, labels, weights.double()) @ head.double()
    torch.testing.assert_close(x.grad.double(), grad, rtol=0.03, atol=0.02)
