"""Losses against the target's distribution: value and gradient against autograd in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash_ext.loss import LOSSES, Teacher, vocabulary_loss
from dflash_ext.ops import soft_labels
from dflash_ext.ops.soft_labels import Chunk, kl_divergence_, negative_log_acceptance_

H, V = 16, 67


def naive_kl(logits: Tensor, teacher: Tensor) -> Tensor:
    return torch.nn.functional.kl_div(
        logits.log_softmax(1), teacher.log_softmax(1), reduction="none", log_target=True
    ).sum(1)


def naive_lk(logits: Tensor, teacher: Tensor) -> Tensor:
    return -torch.minimum(logits.softmax(1), teacher.softmax(1)).sum(1).log()


NAIVE = {"kl": naive_kl, "lk": naive_lk}
LOSS_OF = {"kl": kl_divergence_, "lk": negative_log_acceptance_}


def run(kind: str, logits: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of rows and its gradient, by the operator; in fp64 by its formulas."""
    mine, theirs = logits.clone(), teacher.clone()
    chunk = Chunk(mine, mine.logsumexp(1), theirs, theirs.logsumexp(1), torch.ones(len(logits)))
    if logits.dtype == torch.float64:
        plain = {"kl": soft_labels._kl, "lk": soft_labels._lk}[kind]
        return plain(chunk), mine
    return LOSS_OF[kind](chunk, torch.float32)


def test_the_registry_names_them():
    assert {k: o.against_target for k, o in LOSSES.items()} == {
        "ce": None,
        "dpace": None,
        **LOSS_OF,
    }


@pytest.mark.parametrize("kind", ["kl", "lk"])
@pytest.mark.parametrize(
    ("rows", "width", "scale"), [(5, V, 1.0), (3, 1, 1.0), (7, 4, 8.0), (0, 9, 1.0)]
)
def test_loss_and_gradient_equal_autograd(kind, rows, width, scale):
    torch.manual_seed(rows)
    logits, teacher = torch.randn(2, rows, width, dtype=torch.float64) * scale
    x = logits.clone().requires_grad_()
    truth = NAIVE[kind](x, teacher)
    truth.sum().backward()
    loss, grad = run(kind, logits, teacher)
    torch.testing.assert_close(loss, truth.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(grad, x.grad, rtol=1e-9, atol=1e-12)
    loss, grad = run(kind, logits.float(), teacher.float())
    torch.testing.assert_close(loss.double(), truth.detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(grad.double(), x.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["kl", "lk"])
def test_finite_differences_agree(kind):
    torch.manual_seed(0)
    logits, teacher = torch.randn(2, 1, 6, dtype=torch.float64)
    _, grad = run(kind, logits, teacher)
    step = 1e-6
    for j in range(6):
        up, down = logits.clone(), logits.clone()
        up[0, j] += step
        down[0, j] -= step
        slope = (NAIVE[kind](up, teacher) - NAIVE[kind](down, teacher)) / (2 * step)
        assert grad[0, j].item() == pytest.approx(slope.item(), abs=1e-8)


@pytest.mark.parametrize("kind", ["kl", "lk"])
def test_the_target_itself_has_no_loss(kind):
    logits = torch.randn(4, V) * 3
    loss, grad = run(kind, logits, logits)
    assert loss.abs().max() < 1e-5
    assert grad.abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["kl", "lk"])
def test_a_target_of_one_token_makes_them_cross_entropy(kind):
    torch.manual_seed(0)
    logits, label = torch.randn(5, V), torch.randint(V, (5,))
    teacher = torch.full((5, V), -80.0).scatter(1, label[:, None], 80.0)
    x = logits.clone().requires_grad_()
    truth = torch.nn.functional.cross_entropy(x, label, reduction="none")
    truth.sum().backward()
    loss, grad = run(kind, logits, teacher)
    torch.testing.assert_close(loss, truth.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad, x.grad, rtol=1e-4, atol=1e-5)


def test_acceptance_without_any_overlap_is_finite():
    logits, teacher = torch.full((2, V), -300.0), torch.full((2, V), -300.0)
    logits[:, 3], teacher[:, 9] = 300.0, 300.0
    loss, grad = run("lk", logits, teacher)
    assert loss.isfinite().all()
    assert (loss > 80).all()
    assert grad.isfinite().all()


@pytest.mark.parametrize("kind", ["kl", "lk"])
def test_weights_scale_the_gradient_and_not_the_loss(kind):
    torch.manual_seed(0)
    logits, teacher = torch.randn(2, 4, V)
    loss, grad = run(kind, logits, teacher)
    weights = torch.tensor([0.0, 1.0, 0.5, 3.0])
    chunk = Chunk(logits, logits.logsumexp(1), teacher, teacher.logsumexp(1), weights)
    weighed, scaled = LOSS_OF[kind](chunk, torch.float32)
    torch.testing.assert_close(weighed, loss)
    torch.testing.assert_close(scaled, grad * weights[:, None])


def test_logits_that_do_not_match_are_refused():
    def refused(match: str, logits: Tensor, teacher: Tensor) -> None:
        rows = torch.zeros(2)
        with pytest.raises(ValueError, match=match):
            kl_divergence_(Chunk(logits, rows, teacher, rows, rows), torch.float32)

    good = torch.randn(2, V)
    refused("both must be fp32", good, good.bfloat16())
    refused("both must be the same", good, torch.randn(2, V + 1))
    refused("both must be the same", good, torch.randn(2, V + 1)[:, :V])
    refused(r"contiguous \[3\]", torch.randn(3, V), good)


@pytest.mark.parametrize("kind", ["kl", "lk"])
@pytest.mark.parametrize("chunk_rows", [1, 5, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_whole_loss_equals_the_naive_composition(kind, chunk_rows, dtype):
    """Norm, head, chunks, weights, and the metrics, which stay those of the labels."""
    torch.manual_seed(0)
    sizes, T = [3, 0, 1, 7, 2], 11
    R = sum(sizes)
    hidden, head = torch.randn(R, H).to(dtype), (torch.randn(V, H) * 0.5).to(dtype)
    last, rows = torch.randn(T, H).to(dtype), torch.randint(T, (R,))
    labels, weights = torch.randint(V, (R,)), torch.rand(R) + 0.1

    def norm(x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (H,), torch.linspace(0.5, 2, H, dtype=x.dtype))

    truth_input = hidden.double().requires_grad_()
    logits = truth_input @ head.double().T
    teacher = norm(last.double())[rows] @ head.double().T
    numerator = (NAIVE[kind](logits, teacher) * weights).sum()
    numerator.backward()
    x = hidden.clone().requires_grad_()
    out = vocabulary_loss(
        x,
        head,
        labels,
        weights,
        rows_per_block=sizes,
        kind=kind,
        chunk_rows=chunk_rows,
        teacher=Teacher(last, rows, norm),
    )
    (2.5 * out.numerator).backward()
    loose = dtype == torch.bfloat16
    error = (x.grad.double() - 2.5 * truth_input.grad).norm() / x.grad.double().norm()
    assert error < (0.02 if loose else 1e-4)
    torch.testing.assert_close(
        out.numerator.double(), numerator.detach(), rtol=0.02 if loose else 1e-5, atol=0
    )
    assert out.weight.item() == pytest.approx(weights.sum().item(), rel=1e-6)
    if not loose:
        log_p = logits.detach().log_softmax(1)
        at_label = log_p[torch.arange(R), labels]
        torch.testing.assert_close(out.cross_entropy.double(), -at_label, rtol=1e-4, atol=1e-5)
        assert torch.equal(out.prediction, log_p.argmax(1))
        assert torch.equal(out.rank, (log_p > at_label[:, None]).sum(1))


def test_no_rows():
    hidden = torch.randn(0, H, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    teacher = Teacher(torch.randn(4, H), none, torch.nn.Identity())
    for kind in LOSS_OF:
        out = vocabulary_loss(
            hidden, torch.randn(V, H), none, torch.zeros(0), kind=kind, teacher=teacher
        )
        out.numerator.backward()
        assert out.numerator == out.weight == 0


def test_a_teacher_where_there_should_be_none_or_the_reverse():
    hidden, head, labels = torch.randn(2, H), torch.randn(V, H), torch.tensor([0, 1])
    teacher = Teacher(torch.randn(4, H), labels, torch.nn.Identity())
    with pytest.raises(ValueError, match="loss 'kl' needs teacher"):
        vocabulary_loss(hidden, head, labels, torch.ones(2), kind="kl")
    with pytest.raises(ValueError, match="loss 'ce' takes no teacher"):
        vocabulary_loss(hidden, head, labels, torch.ones(2), teacher=teacher)
