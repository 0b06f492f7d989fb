"""What a unit's micro-batches have added up, in full precision: on the device, or in host memory meanwhile."""

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from .. import _C
from ..common.storage import allocate, is_allocated, pinned
from ._parameters import Parameters


class Sum(Enum):
    """Where the sum of the micro-batches is."""

    NONE = auto()
    ZEROS = auto()  # nothing was added yet
    ON_DEVICE = auto()
    ON_HOST = auto()  # what memory it may still have on the device counts no more


class Accumulation(Parameters):
    """The part of the handle that keeps ``_full_prec_grad_padded`` and its copy ``_cpu_grad`` on the host.

    Whatever works on them waits, on its stream, for what worked on them before: drivers may use any streams.
    """

    _sum = Sum.NONE
    _last_use: Any = None  # an event on an accelerator

    def init_flat_param_attributes(self) -> None:
        super().init_flat_param_attributes()
        if self._offload_grads:
            flat_param = self.flat_param
            size = flat_param._padded_unsharded_size
            flat_param._cpu_grad = pinned(torch.zeros(size, dtype=self.full_prec_dtype, device="cpu"))

    @contextmanager
    def _in_order(self) -> Generator[None, None, None]:
        if self._last_use is not None:
            self._last_use.wait()
        with torch.no_grad():
            yield
        if self.device.type != "cpu":
            self._last_use = self._device_handle.Event()
            self._last_use.record()

    def already_load_full_prec_grad(self) -> bool:
        """Whether the sum, or zeros to begin one with, is on the device."""
        return self._sum in (Sum.ZEROS, Sum.ON_DEVICE)

    def alloc_full_prec_grad(self) -> None:
        """Give the sum memory on the device: zeros, unless it is to be reloaded from the host."""
        if self.already_load_full_prec_grad():
            return
        self._allocate_sum()
        if self._sum is Sum.NONE:
            with self._in_order():
                self.flat_param._full_prec_grad_padded.zero_()
            self._sum = Sum.ZEROS

    def _allocate_sum(self) -> None:
        self._wait_for_reduction()  # it may still read that memory
        allocate(self.flat_param._full_prec_grad_padded, self.flat_param._padded_unsharded_size)

    def _wait_for_reduction(self) -> None:
        raise NotImplementedError

    def free_full_prec_grad(self) -> None:
        """Free the sum's memory on the device; it is given up unless it was offloaded."""
        if self._sum is not Sum.ON_HOST:
            was_shown = self._stop_showing()
            self._sum = Sum.NONE
            if was_shown:
                self._show_reduced()
        total = self.flat_param._full_prec_grad_padded
        if is_allocated(total):
            with self._in_order():
                self._free(total)

    def _add(self, grads: list[Tensor]) -> None:
        """Add gradients of one micro-batch, of any dtype, in one pass over memory each."""
        self.reload_full_prec_grad()
        total = self.flat_param._full_prec_grad_padded
        if self._sum is Sum.NONE:
            self._allocate_sum()
        with self._in_order():
            for grad in grads:
                first = self._sum is Sum.NONE
                if _C.is_plain(total, grad):
                    _C.convert(total, grad.detach(), not first)
                elif first:
                    total.copy_(grad)
                else:
                    total.add_(grad)
                self._sum = Sum.ON_DEVICE

    def offload_grad(self) -> None:
        """Copy the sum into ``_cpu_grad``, where it is then; ``free_full_prec_grad()`` frees it on the device.

        The copy runs on the current stream. Raises: RuntimeError if nothing was accumulated since the last reduction.
        """
        if not self._offload_grads:
            warnings.warn(
                f"offload_grad() does nothing for {self._names()}: it was made with offload_grads=False", stacklevel=2
            )
            return
        if self._sum is not Sum.ON_DEVICE:
            raise RuntimeError(
                f"{self._names()} has no gradient on the device to offload ({self._sum.name}): call it after "
                "accumulate_grad() of a micro-batch"
            )
        shown = self._stop_showing()
        with self._in_order():
            self.flat_param._cpu_grad.copy_(self.flat_param._full_prec_grad_padded, non_blocking=True)
        self._sum = Sum.ON_HOST
        if shown:
            self._show_sum()

    def reload_full_prec_grad(self) -> None:
        """Copy the sum back to the device, on the current stream, if it was offloaded; else nothing."""
        if self._sum is not Sum.ON_HOST:
            return
        self._stop_showing()
        self._allocate_sum()
        with self._in_order():
            self.flat_param._full_prec_grad_padded.copy_(self.flat_param._cpu_grad, non_blocking=True)
        self._sum = Sum.ON_DEVICE

    @property
    def _sum_memory(self) -> Tensor:
        flat_param = self.flat_param
        total: Tensor = flat_param._cpu_grad if self._sum is Sum.ON_HOST else flat_param._full_prec_grad_padded
        return total

    def _stop_showing(self) -> bool:
        raise NotImplementedError

    def _show_sum(self) -> None:
        raise NotImplementedError

    def _show_reduced(self) -> None:
        raise NotImplementedError
