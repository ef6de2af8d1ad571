"""The chunked objective against naive full-logits fp64, and what it must never allocate."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_ext.config import LossOptions
from dflash_ext.errors import UserError
from dflash_ext.loss import (
    chunk_bounds,
    dpace_weights,
    fp8_logits,
    quantised_head,
    vocabulary_loss,
    vocabulary_topk,
)

H, V = 24, 211


def naive_dpace(p: list[float], alpha: float) -> list[float]:
    """w_j = sum_{m >= j} prod_{i <= m} q_i, by the definition."""
    q = [(1 - alpha) * x + alpha for x in p]
    weights = []
    for j in range(len(p)):
        total = 0.0
        for m in range(j, len(p)):
            product = 1.0
            for i in range(m + 1):
                product *= q[i]
            total += product
        weights.append(total)
    return weights


def naive(hidden, head, labels, weights, sizes, kind, alpha):
    """numerator, weight sum, weights: full logits in fp64, weights detached."""
    log_p = (hidden @ head.T).log_softmax(-1)
    ce = -log_p[torch.arange(len(labels)), labels]
    if kind == "dpace":
        p, used, start = (-ce).exp().tolist(), [], 0
        for size in sizes:
            used += naive_dpace(p[start : start + size], alpha)
            start += size
        weights = torch.tensor(used, dtype=torch.float64)
    return (weights * ce).sum(), weights, log_p


def case(sizes, seed=0):
    torch.manual_seed(seed)
    R = sum(sizes)
    hidden = torch.randn(R, H, dtype=torch.float64)
    head = torch.randn(V, H, dtype=torch.float64) * 0.5
    return hidden, head, torch.randint(V, (R,)), torch.rand(R, dtype=torch.float64) + 0.1


@pytest.mark.parametrize("kind", ["ce", "dpace"])
@pytest.mark.parametrize("chunk_rows", [1, 4, 7, 13, 1000])
def test_loss_and_gradient_equal_fp64(kind, chunk_rows):
    sizes = [3, 0, 1, 7, 7, 2, 7, 5, 1]
    hidden, head, labels, weights = case(sizes)
    truth_input = hidden.clone().requires_grad_()
    numerator, used, log_p = naive(truth_input, head, labels, weights, sizes, kind, alpha=0.3)
    numerator.backward()

    x = hidden.float().requires_grad_()
    out = vocabulary_loss(
        x,
        head.float(),
        labels,
        weights.float(),
        rows_per_block=sizes,
        kind=kind,
        alpha=0.3,
        chunk_rows=chunk_rows,
    )
    (2.5 * out.numerator).backward()  # an incoming gradient other than 1 must scale
    torch.testing.assert_close(out.numerator.double(), numerator, rtol=1e-5, atol=0)
    torch.testing.assert_close(out.weight.double(), used.sum(), rtol=1e-5, atol=0)
    torch.testing.assert_close(x.grad.double(), 2.5 * truth_input.grad, rtol=1e-4, atol=1e-6)
    at_label = log_p[torch.arange(len(labels)), labels].detach()
    torch.testing.assert_close(out.cross_entropy.double(), -at_label, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.probability.double(), at_label.exp(), rtol=1e-4, atol=1e-7)
    assert torch.equal(out.prediction, log_p.argmax(-1))
    assert torch.equal(out.rank, (log_p > at_label[:, None]).sum(-1))


def test_dpace_weights_are_detached_and_per_block():
    sizes = [2, 3]
    hidden, head, labels, weights = case(sizes)
    for alpha in (0.0, 0.5, 1.0):
        out = vocabulary_loss(
            hidden.float(),
            head.float(),
            labels,
            weights.float(),
            rows_per_block=sizes,
            kind="dpace",
            alpha=alpha,
        )
        p = out.probability.tolist()
        expected = naive_dpace(p[:2], alpha) + naive_dpace(p[2:], alpha)
        got = dpace_weights(out.probability, sizes, alpha)
        assert got.tolist() == pytest.approx(expected, rel=1e-5)
    assert got.tolist() == [2, 1, 3, 2, 1]  # alpha 1: every slot counts those behind it


def test_bf16_error_is_within_twice_torch_s_own():
    hidden, head, labels, weights = case([7] * 40)
    truth = hidden.clone().requires_grad_()
    naive(truth, head, labels, weights, None, "ce", 0)[0].backward()
    peer = hidden.bfloat16().requires_grad_()
    logits = (peer @ head.bfloat16().T).float()
    ce = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    (ce * weights.float()).sum().backward()
    own = hidden.bfloat16().requires_grad_()
    vocabulary_loss(own, head.bfloat16(), labels, weights.float()).numerator.backward()

    def error(x):
        return (x.grad.double() - truth.grad).norm()

    assert own.grad.dtype == torch.bfloat16
    assert error(own) <= 2 * error(peer) + 1e-6


class Largest(TorchDispatchMode):
    """Records the largest number of elements of any tensor an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor is not None:
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("kind", ["ce", "dpace"])
def test_no_tensor_of_rows_times_vocabulary(kind):
    """Requirement 14: nothing larger than one chunk's logits, in forward and backward."""
    sizes, chunk_rows, big = [3] * 100, 9, 5000
    hidden = torch.randn(300, H, requires_grad=True)
    head, labels = torch.randn(big, H), torch.randint(big, (300,))
    with Largest() as seen:
        out = vocabulary_loss(
            hidden,
            head,
            labels,
            torch.ones(300),
            rows_per_block=sizes,
            kind=kind,
            chunk_rows=chunk_rows,
        )
        out.numerator.backward()
        vocabulary_topk(hidden.detach(), head, 4, chunk_rows=chunk_rows)
    # The head itself (V x H) is a view when transposed; 300 x V would be 1.5 M elements.
    assert seen.elements == max(chunk_rows * big, big * H)
    with Largest() as seen:
        torch.nn.functional.cross_entropy(hidden @ head.T, labels)
    assert seen.elements == 300 * big  # the probe does see the naive way


@settings(max_examples=100)
@given(sizes=st.lists(st.integers(0, 9), max_size=30), chunk_rows=st.integers(1, 40))
def test_chunks_are_whole_blocks_and_cover_every_row_once(sizes, chunk_rows):
    chunks = list(chunk_bounds(sizes, chunk_rows))
    assert [s for _, _, part in chunks for s in part] == [s for s in sizes if s]
    position = 0
    for start, end, part in chunks:
        assert start == position
        assert end - start == sum(part) > 0
        assert end - start <= chunk_rows or len(part) == 1
        position = end
    assert position == sum(sizes)


def test_no_rows_give_zero_and_no_gradient():
    hidden = torch.randn(0, H, requires_grad=True)
    out = vocabulary_loss(
        hidden, torch.randn(V, H), torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    )
    out.numerator.backward()
    assert out.numerator == out.weight == 0
    assert hidden.grad.shape == (0, H)


@pytest.mark.parametrize("other_term", [False, True])
def test_a_second_derivative_is_refused(other_term):
    """Else a penalty on the gradient would silently leave this part out, beside other terms too."""
    hidden = torch.randn(2, H, requires_grad=True)
    out = vocabulary_loss(hidden, torch.randn(V, H), torch.tensor([0, 1]), torch.ones(2))
    loss = out.numerator + hidden.pow(3).sum() if other_term else out.numerator.square()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)[0].square().sum().backward()


def test_topk_equals_full_log_softmax():
    hidden, head, _, _ = case([5] * 6)
    log_probs, ids = vocabulary_topk(hidden.float(), head.float(), 7, chunk_rows=4)
    expected = (hidden @ head.T).log_softmax(-1).topk(7)
    torch.testing.assert_close(log_probs.double(), expected.values, rtol=1e-5, atol=1e-5)
    assert torch.equal(ids, expected.indices)


def test_wrong_options_are_errors():
    hidden, labels, weights = torch.randn(2, H), torch.tensor([0, 1]), torch.ones(2)
    head = torch.randn(V, H)
    with pytest.raises(UserError, match="'mse' is unknown"):
        vocabulary_loss(hidden, head, labels, weights, kind="mse")
    with pytest.raises(UserError, match="alpha 2"):
        vocabulary_loss(hidden, head, labels, weights, alpha=2)
    with pytest.raises(UserError, match="chunk_rows 0"):
        vocabulary_loss(hidden, head, labels, weights, chunk_rows=0)
    with pytest.raises(ValueError, match="whole blocks"):
        vocabulary_loss(hidden, head, labels, weights, kind="dpace")
    with pytest.raises(ValueError, match="rows_per_block sums to 3"):
        vocabulary_loss(hidden, head, labels, weights, rows_per_block=[3])


@pytest.mark.parametrize("V", [64, 70])
def test_an_fp8_head_changes_the_loss_by_its_rounding(V):
    """Also where V is no multiple of 16; the gradient goes through the head itself."""
    torch.manual_seed(0)
    R, H = 60, 32
    head = (torch.randn(V, H) * 0.3).bfloat16()
    labels, weights = torch.randint(V, (R,)), torch.rand(R) + 0.1
    x = torch.randn(R, H).bfloat16()
    found = []
    for fp8 in (None, quantised_head(head)):
        hidden = x.clone().requires_grad_()
        out = vocabulary_loss(hidden, head, labels, weights, chunk_rows=16, head_fp8=fp8)
        out.numerator.backward()
        found.append((out.numerator.item(), hidden.grad.double()))
    (loss, grad), (loss_8, grad_8) = found
    assert 0 < abs(loss_8 - loss) < 0.02 * loss
    assert 0 < (grad_8 - grad).norm() < 0.15 * grad.norm()
    q = quantised_head(head)
    assert len(q.scales) % 16 == 0
    logits = (x.float() @ (q.values.float() * q.scales[:, None]).T)[:, :V]
    ours = fp8_logits(x, q, torch.empty(R, V, dtype=torch.bfloat16))
    assert (ours.float() - logits).norm() < 0.05 * logits.norm()
    wide = torch.empty(R, len(q.scales), dtype=torch.bfloat16)
    assert torch.equal(fp8_logits(x, q, wide[:, :V]), ours)  # written where it will be read
    assert torch.equal(wide[:, :V], ours)


def test_an_fp8_head_is_for_bf16_and_for_labels():
    head = torch.randn(32, 16)
    with pytest.raises(ValueError, match="needs bf16 rows and no teacher"):
        vocabulary_loss(
            torch.randn(2, 16), head, torch.zeros(2).long(), torch.ones(2),
            head_fp8=quantised_head(head),
        )  # fmt: skip
    with pytest.raises(UserError, match=r"leave --loss\.fp8-head out"):
        LossOptions(kind="kl", fp8_head=True)
