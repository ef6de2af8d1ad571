"""The vocabulary loss on a GPU: the 2x rule, any V, 64-bit offsets, in place, deterministic."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_soft_labels import NAIVE
from torch import Tensor

from dflash_ext.loss import (
    LOSSES,
    Teacher,
    fp8_logits,
    needs_teacher,
    quantised_head,
    vocabulary_loss,
)
from dflash_ext.ops import vocabulary as operator
from dflash_ext.ops.soft_labels import Chunk
from dflash_ext.ops.vocabulary import logits_buffer, new_statistics

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
DTYPES = [torch.float32, torch.bfloat16]
# Whole tiles of 4,096, one more, one less, less than a vector, and the largest vocabulary.
SIZES = [1, 5, 4095, 4096, 4097, 8192, 12_345, 32_000, 151_936, 262_144, 262_144 + 7]


def filled(values: Tensor) -> Tensor:
    """`values` where the kernels may read them; what is behind a row is NaN."""
    buffer = logits_buffer(*values.shape, values.dtype, CUDA)
    buffer.as_strided((len(buffer), buffer.stride(0)), buffer.stride()).fill_(torch.nan)
    return buffer.copy_(values)


def problem(rows: int, V: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    logits = (torch.randn(rows, V, device=CUDA) * 4).to(dtype)
    return logits, torch.randint(V, (rows,), device=CUDA), torch.rand(rows, device=CUDA) + 0.1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("V", SIZES)
def test_both_kernels_equal_fp64(V, dtype):
    """Also the proof that rows are replaced in place: each gradient needs all of its logits."""
    values, labels, weights = problem(33, V, dtype, seed=V)
    logits, stats = filled(values), new_statistics(33, CUDA)
    operator.vocabulary_statistics(logits, labels, stats)
    truth = operator.statistics_reference(values.double(), labels)
    torch.testing.assert_close(stats.lse.double(), truth.lse, rtol=1e-6, atol=1e-6)
    assert torch.equal(stats.at_label.double(), truth.at_label)
    assert torch.equal(stats.prediction, truth.prediction)
    assert torch.equal(stats.rank, truth.rank)
    grad = operator.vocabulary_gradient_(logits, labels, stats, weights, torch.bfloat16)
    assert grad.data_ptr() == logits.data_ptr()
    exact = operator.gradient_reference(values.double(), labels, weights.double())
    peer = operator.gradient_reference(values.float(), labels, weights).bfloat16()
    error, theirs = ((x.double() - exact).norm() for x in (grad, peer))
    # Where p(label) is 1, p - 1 is what fp32 leaves of it: a few units of the lse.
    assert error <= 2 * theirs + 2e-5
    assert ((grad.double() - exact).abs() <= 2**-7 * exact.abs() + 5e-6).all()


@pytest.mark.parametrize("kind", NAIVE)
@pytest.mark.parametrize("V", SIZES)
def test_kernels_of_losses_against_the_target_equal_fp64(V, kind):
    """Values, gradients in place, the target's logits untouched, the same bits twice."""
    values, _, weights = problem(33, V, torch.float32, seed=V)
    others, _, _ = problem(33, V, torch.float32, seed=V + 1)
    x = values.double().requires_grad_()
    truth = NAIVE[kind](x, others.double())
    (exact,) = torch.autograd.grad((truth * weights.double()).sum(), x)
    found = []
    for _ in range(2):
        mine, theirs = filled(values), filled(others)
        lse, teacher_lse = operator.row_lse(mine), operator.row_lse(theirs)
        chunk = Chunk(mine, lse, theirs, teacher_lse, weights)
        loss, grad = LOSSES[kind].against_target(chunk, torch.bfloat16)
        assert grad.data_ptr() == mine.data_ptr()
        assert torch.equal(theirs, others)
        found.append((loss, grad))
    assert all(torch.equal(a, b) for a, b in zip(*found))
    torch.testing.assert_close(loss.double(), truth.detach(), rtol=1e-5, atol=2e-5)
    # Differences of probabilities carry those' own rounding. Next to its kink lk has either slope.
    ratio = x.detach().log_softmax(1) - others.double().log_softmax(1)
    kink = (ratio.abs() < 1e-4) & (kind == "lk")
    assert (((grad.double() - exact).abs() <= 2**-7 * exact.abs() + 5e-6) | kink).all()


def test_ties_take_the_lowest_index():
    V = 20_000
    for places in ([3, 19], [12_000, 5], [19_999], [4096, 8192, 16_384], list(range(V))):
        row = torch.linspace(-3, -1, V, device=CUDA)
        row[places] = 2.0
        stats = new_statistics(1, CUDA)
        operator.vocabulary_statistics(
            filled(row[None]), torch.tensor([places[-1]], device=CUDA), stats
        )
        assert stats.prediction.item() == min(places)
        assert stats.rank.item() == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_behind_2_to_the_31_elements(dtype):
    """V = 151,936 passes 2^31 elements in row 14,134 (fp32: bytes in row 3,533)."""
    V, rows = 151_936, 14_140
    logits = logits_buffer(rows, V, dtype, CUDA).zero_()
    labels = torch.arange(rows, device=CUDA) % V
    logits[-3:, 77] = 5.0
    stats, weights = new_statistics(rows, CUDA), torch.ones(rows, device=CUDA)
    operator.vocabulary_statistics(logits, labels, stats)
    assert stats.prediction[-4:].tolist() == [0, 77, 77, 77]
    grad = operator.vocabulary_gradient_(logits, labels, stats, weights, torch.bfloat16)
    torch.testing.assert_close(
        grad[-1, 77].item(), (5.0 - stats.lse[-1]).exp().item(), rtol=0.01, atol=0
    )
    for row in (0, 14_134, rows - 1):
        assert grad[row, labels[row]].item() == pytest.approx(-1, rel=0.01)
        others = grad[row].double().sum() - grad[row, labels[row]].double()
        assert others.item() == pytest.approx(1, rel=0.01)


def test_the_same_bits_every_time_while_other_streams_run():
    values, labels, weights = problem(2_000, 32_003, torch.float32)
    seen = []
    for attempt in range(6):
        logits, stats = filled(values), new_statistics(len(values), CUDA)
        stream = torch.cuda.Stream() if attempt % 2 else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            operator.vocabulary_statistics(logits, labels, stats)
            grad = operator.vocabulary_gradient_(logits, labels, stats, weights, torch.bfloat16)
        stream.synchronize()
        seen.append((*stats, grad))
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other))


@pytest.mark.parametrize("logits_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("V", [4_099, 32_000])
def test_whole_loss_is_within_twice_torch_s_error(V, logits_dtype):
    torch.manual_seed(0)
    R, H = 300, 256
    hidden = torch.randn(R, H, device=CUDA, dtype=torch.float64) * 0.2
    head = torch.randn(V, H, device=CUDA, dtype=torch.float64) * 0.2
    labels, weights = torch.randint(V, (R,), device=CUDA), torch.rand(R, device=CUDA) + 0.1

    def composition(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = hidden.to(dtype).detach().requires_grad_()  # fp64: `to` alone returns hidden itself
        logits = x @ head.to(dtype).T
        logits = logits.float() if dtype == torch.bfloat16 else logits
        loss = F.cross_entropy(logits, labels, reduction="none")
        (loss * weights.to(loss.dtype)).sum().backward()
        return loss.detach(), x.grad

    true_loss, true_grad = composition(torch.float64)
    peer_loss, peer_grad = composition(torch.bfloat16)
    x = hidden.bfloat16().requires_grad_()
    out = vocabulary_loss(
        x, head.bfloat16(), labels, weights, chunk_rows=128, logits_dtype=logits_dtype
    )
    out.numerator.backward()
    for ours, peer, truth in (
        (out.cross_entropy, peer_loss, true_loss),
        (x.grad, peer_grad, true_grad),
    ):
        assert (ours.double() - truth).norm() <= 2 * (peer.double() - truth).norm() + 1e-6


def test_one_chunk_of_logits_is_all_the_memory():
    """Forward and backward take the chunk's buffer and the gradient of hidden, no more."""
    R, H, V, chunk = 4_096, 512, 65_539, 512
    hidden = torch.randn(R, H, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(V, H, device=CUDA, dtype=torch.bfloat16)
    labels, weights = torch.randint(V, (R,), device=CUDA), torch.ones(R, device=CUDA)
    vocabulary_loss(hidden, head, labels, weights, chunk_rows=chunk)  # cuBLAS takes its workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    vocabulary_loss(hidden, head, labels, weights, chunk_rows=chunk)
    taken = torch.cuda.max_memory_allocated() - before
    per_row = R * (2 * 4 + 2 * 8 + 8 * 4)  # statistics, weights and what is returned
    assert taken <= chunk * (V + 16) * 4 + R * H * 2 + per_row + 2**20


@pytest.mark.parametrize("kind", ["kl", "lk"])
def test_losses_against_the_target_are_within_twice_torch_s_error(kind):
    torch.manual_seed(0)
    R, H, V = 200, 256, 4_099
    hidden, last = torch.randn(2, R, H, device=CUDA, dtype=torch.float64) * 0.2
    head = torch.randn(V, H, device=CUDA, dtype=torch.float64) * 0.2
    labels, weights = torch.randint(V, (R,), device=CUDA), torch.rand(R, device=CUDA) + 0.1

    def composition(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = hidden.to(dtype).detach().requires_grad_()  # fp64: `to` alone returns hidden itself
        logits, theirs = (y @ head.to(dtype).T for y in (x, last.to(dtype)))
        if dtype == torch.bfloat16:
            logits, theirs = logits.float(), theirs.float()
        numerator = (NAIVE[kind](logits, theirs) * weights).sum()
        numerator.backward()
        return numerator.detach(), x.grad

    true_loss, true_grad = composition(torch.float64)
    peer_loss, peer_grad = composition(torch.bfloat16)
    x = hidden.bfloat16().requires_grad_()
    teacher = Teacher(last.bfloat16(), torch.arange(R, device=CUDA), torch.nn.Identity())
    out = vocabulary_loss(
        x, head.bfloat16(), labels, weights, kind=kind, chunk_rows=64, teacher=teacher
    )
    out.numerator.backward()
    assert abs(out.numerator - true_loss) <= 2 * abs(peer_loss - true_loss) + 1e-5 * true_loss
    assert (x.grad - true_grad).norm() <= 2 * (peer_grad - true_grad).norm() + 1e-6


@pytest.mark.parametrize("kind", LOSSES)
def test_no_synchronisation(kind):
    """Requirement 16: the host never waits."""
    hidden = torch.randn(60, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(999, 64, device=CUDA, dtype=torch.bfloat16)
    labels, weights = torch.randint(999, (60,), device=CUDA), torch.ones(60, device=CUDA)
    teacher = Teacher(hidden.detach(), torch.arange(60, device=CUDA), torch.nn.Identity())

    def step() -> None:
        out = vocabulary_loss(
            hidden,
            head,
            labels,
            weights,
            kind=kind,
            rows_per_block=[3] * 20,
            chunk_rows=16,
            teacher=teacher if needs_teacher(kind) else None,
        )
        out.numerator.backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_rows_that_are_not_aligned_are_refused():
    stats = new_statistics(3, CUDA)
    labels = torch.zeros(3, dtype=torch.int64, device=CUDA)
    with pytest.raises(ValueError, match="take them from logits_buffer"):
        operator.vocabulary_statistics(torch.zeros(3, 21, device=CUDA), labels, stats)
    with pytest.raises(ValueError, match="float16 are not supported"):
        operator.vocabulary_statistics(torch.zeros(3, 32, device=CUDA).half(), labels, stats)
    with pytest.raises(ValueError, match=r"contiguous \[3\]"):
        operator.vocabulary_statistics(torch.zeros(3, 32, device=CUDA), labels.cpu(), stats)


def test_no_rows():
    logits, stats = logits_buffer(0, 100, torch.float32, CUDA), new_statistics(0, CUDA)
    labels = torch.zeros(0, dtype=torch.int64, device=CUDA)
    operator.vocabulary_statistics(logits, labels, stats)
    grad = operator.vocabulary_gradient_(logits, labels, stats, labels.float(), torch.bfloat16)
    assert grad.shape == (0, 100)


@pytest.mark.parametrize("V", [4096, 32_000 - 3, 151_936])
def test_fp8_logits_are_those_of_the_emulation(V):
    head = (torch.randn(V, 512, device=CUDA) * 0.05).bfloat16()
    hidden = torch.randn(70, 512, device=CUDA).bfloat16()
    ours = fp8_logits(hidden, quantised_head(head), logits_buffer(70, V, torch.bfloat16, CUDA))
    plain = torch.empty(70, V, dtype=torch.bfloat16)
    emulated = fp8_logits(hidden.cpu(), quantised_head(head.cpu()), plain)
    assert ours.shape == (70, V)
    assert (ours.cpu().double() - emulated.double()).norm() < 0.01 * emulated.double().norm()
