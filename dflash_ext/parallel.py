"""The drafters' common optimizer step: sums over all of them, whoever had how much.

Gradients here are those of the loss numerator, so their plain sum is the gradient of the whole
step, and dividing it by the summed weight is the exact mean however samples were split (requirement
11). Every drafter takes part in every sum, also with nothing to add (requirement 18), and the sums
are the same bits on all, so decisions taken from them need no further message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from dflash_ext.drafter import Drafter

_SMALL = 2**18  # values; tensors below it are summed together


def sum_over(group: Any, tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its sum over the ranks of `group`, which all call this alike."""
    large, small = list[Tensor](), list[Tensor]()
    for tensor in tensors:
        (large if tensor.numel() >= _SMALL else small).append(tensor)
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in large]
    if small:
        flat = torch.cat([tensor.flatten() for tensor in small])
        dist.all_reduce(flat, group=group)
        parts = flat.split([tensor.numel() for tensor in small])
        for tensor, part in zip(small, parts):
            tensor.copy_(part.view_as(tensor))
    for work in works:
        work.wait()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_like(whole: Tensor, like: Tensor) -> Tensor:
    """A tensor that every rank has whole, on the device of `like` and sharded as it is."""
    if not isinstance(like, DTensor):
        return whole.to(like.device)
    local = whole.to(like.device)
    # Every rank cuts its own part: nothing needs to be sent.
    return distribute_tensor(local, like.device_mesh, like.placements, src_data_rank=None)


class Replicas:
    """The drafters as replicas of each other, each with all parameters; or a single one."""

    def __init__(self, group: Any, drafter: Drafter) -> None:
        """group: process group of all drafters, None if there is one."""
        self.group, self.drafter = group, drafter

    def synchronise(self) -> None:
        """Begin with drafter 0's weights, to the bit."""
        if self.group is not None:
            for parameter in self.drafter.parameters():
                dist.broadcast(local(parameter.detach()), src=0, group=self.group)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the micro-batches of one optimizer step, however many this drafter has."""
        yield

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around forwards without gradients, however many this drafter has."""
        yield

    def reduce(self, sums: Tensor) -> Tensor:
        """Sum gradients and `sums` (fp32) over all drafters, after `step`."""
        if self.group is None:
            return sums
        gradients = []
        for parameter in self.drafter.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        sum_over(self.group, [*gradients, sums])
        return sums

    def sum(self, values: Tensor) -> Tensor:
        """The sum of `values` over all drafters."""
        if self.group is not None:
            sum_over(self.group, [values])
        return values

    def whole(self) -> Drafter:
        """A drafter with all parameters in one place; all drafters call this together."""
        return self.drafter


class Shards(Replicas):
    """Parameters, gradients and moments sharded over the drafters (torch's `fully_shard`).

    Parameters are gathered once for a step and gradients summed once at its end, by a backward pass
    that adds nothing: so drafters may differ in how many micro-batches they have.
    """

    def __init__(
        self, group: Any, drafter: Drafter, forward: nn.Module, closing: Callable[[], None]
    ) -> None:
        """forward: the module that holds the drafter; closing: a backward pass of zeros."""
        from torch.distributed.fsdp import FSDPModule, fully_shard  # takes a while to import

        super().__init__(group, drafter)
        self._closing = closing
        device = next(drafter.parameters()).device
        mesh = DeviceMesh.from_group(group, device.type)
        fully_shard(forward, mesh=mesh, reshard_after_forward=False)
        self._forward = cast(FSDPModule, forward)
        # Sums, not means: the division by the weight of the whole step comes later.
        self._forward.set_force_sum_reduction_for_comms(True)
        self._forward.set_gradient_divide_factor(1.0)

    @contextmanager
    def step(self) -> Iterator[None]:
        self._forward.set_requires_gradient_sync(False)
        self._forward.set_reshard_after_backward(False)
        self._forward.unshard()
        yield
        self._forward.set_requires_gradient_sync(True)
        self._forward.set_reshard_after_backward(True)
        self._closing()

    @contextmanager
    def reading(self) -> Iterator[None]:
        self._forward.unshard()
        yield
        self._forward.reshard()

    def reduce(self, sums: Tensor) -> Tensor:
        return self.sum(sums)  # the gradients are summed already

    def whole(self) -> Drafter:
        drafter = Drafter(self.drafter.config)
        own = dict(self.drafter.named_parameters())
        with torch.no_grad():
            for name, parameter in drafter.named_parameters():
                parameter.copy_(cast("DTensor", own[name].detach()).full_tensor())
        return drafter.to(local(own["fc.weight"]).device)
