"""FlatParamHandle of LayerZeRO: one unit, its parameters over two groups, driven step by step without a wrapper."""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from ..common.torch_private import HandleShardingStrategy
from ..fsdp.agreement import Described, check_described
from ._gradients import Gradients
from .groups import check_groups, describe

_owners: "weakref.WeakValueDictionary[int, FlatParamHandle]" = weakref.WeakValueDictionary()  # by parameters' ids


class FlatParamHandle(Gradients):
    """Owns the flat parameter of one unit: masters over the zero1 group, what forwards gather over the zero3 group.

    Args:
        params: the parameters to flatten; at least one, all in ``zero3_module``'s tree, real floating-point ones of
            one dtype and device, in no other handle.
        zero3_module: the module whose forward needs them.
        device: where it computes and communicates.
        mp_param_dtype: dtype of forward, backward and all-gathers; None for the parameters' own.
        mp_reduce_dtype: dtype of the reduce-scatter; None for that of the masters, which is the parameters' own, and
            fp32 at least.
        zero3_process_group: the ranks that share what forward and backward gather; of one size on all ranks, disjoint.
        zero1_process_group: the ranks that share masters, gradients and optimizer state; it holds the former.
        offload_grads: keep what micro-batches add up in host memory between them; ``4 * N`` bytes of it, pinned.

    All ranks of ``zero1_process_group`` construct it alike. Shapes: ``flat_param`` is 1-D, N elements unsharded, N over
    the ranks of zero1 when sharded; ``flat_param._zero1_shard`` is the master, ``_zero3_shard`` N over the ranks of
    zero3. Raises: ValueError, TypeError on all ranks alike for what is in docs/layerzero.md.
    Source: MindSpeed's LayerZeRO, ``zero3/flat_param.py``: its names and order of calls; docs/layerzero.md says what
    differs.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter | Tensor],
        zero3_module: nn.Module,
        device: torch.device,
        mp_param_dtype: torch.dtype | None,
        mp_reduce_dtype: torch.dtype | None,
        zero3_process_group: dist.ProcessGroup,
        zero1_process_group: dist.ProcessGroup,
        offload_grads: bool = False,
    ) -> None:
        params = list(params)
        self.initialize(
            params,
            zero3_module,
            device,
            mp_param_dtype,
            mp_reduce_dtype,
            zero3_process_group,
            zero1_process_group,
            offload_grads,
        )
        super().__init__(
            params,
            zero3_module,
            torch.device(device),
            HandleShardingStrategy.FULL_SHARD,
            offload_params=False,
            mp_param_dtype=mp_param_dtype,
            mp_reduce_dtype=mp_reduce_dtype,
            keep_low_precision_grads=False,
            process_group=zero1_process_group,
            use_orig_params=True,
        )
        _owners.update((id(param), self) for param in params)

    def initialize(
        self,
        params: Sequence[nn.Parameter | Tensor],
        zero3_module: nn.Module,
        device: torch.device,
        mp_param_dtype: torch.dtype | None,
        mp_reduce_dtype: torch.dtype | None,
        zero3_process_group: dist.ProcessGroup,
        zero1_process_group: dist.ProcessGroup,
        offload_grads: bool = False,
    ) -> None:
        """Check everything, with all ranks of ``zero1_process_group``, and set what a driver may write: flags."""
        what = f"FlatParamHandle of {type(zero3_module).__name__}"
        check_groups(zero3_process_group, zero1_process_group, what)
        self.zero3_process_group, self.zero1_process_group = zero3_process_group, zero1_process_group
        self.zero3_group_rank, self.zero3_group_size = zero3_process_group.rank(), zero3_process_group.size()
        self.zero1_group_rank, self.zero1_world_size = zero1_process_group.rank(), zero1_process_group.size()
        problem, described = None, Described()
        try:
            for name, dtype in (("mp_param_dtype", mp_param_dtype), ("mp_reduce_dtype", mp_reduce_dtype)):
                if dtype is not None and not dtype.is_floating_point:
                    raise ValueError(f"{what}: expected {name} to be a floating-point dtype or None, got {dtype}")
            names = self._check_params(params, zero3_module, what)
            settings = (
                f"zero3 of {self.zero3_group_size}, zero1 of {self.zero1_world_size} ranks, "
                f"mp_param_dtype={mp_param_dtype}, mp_reduce_dtype={mp_reduce_dtype}, offload_grads={offload_grads}"
            )
            described = describe(settings, names, params)
        except (ValueError, TypeError) as error:
            problem = error
        check_described(described, problem, zero1_process_group)
        self._offload_grads = bool(offload_grads)
        self._needs_param_sync = True
        self._param_synced = False
        self._grad_synced = False
        self._ran_pre_backward_hook = False
        self._ran_post_backward_hook = False
        self.enter_backward = False
        self.prev_iter_synced = True

    def _check_params(self, params: Sequence[Any], module: nn.Module, what: str) -> list[str]:
        """The names of ``params``. Raises: ValueError naming one that cannot be flattened with the others, and why."""
        if len(params) == 0:
            raise ValueError(f"Cannot construct a {what} with an empty parameter list")
        self._use_orig_params = True
        for i, param in enumerate(params):
            owner = _owners.get(id(param))
            if owner is not None:
                name = next((name for name, other in module.named_parameters() if other is param), f"params[{i}]")
                raise ValueError(
                    f"parameter `{name}` of {what} is flattened already: it belongs to {owner._names()}; a parameter "
                    "can be in one unit only"
                )
        places = self._find_places(params, module)
        self._fqn_of = {param: names[0].fqn for param, names in places.items()}
        try:
            for param in params:
                if param.is_complex():
                    raise ValueError(f"{self._describe(param)} is complex: LayerZero flattens real parameters only")
                if param.is_meta:
                    raise ValueError(
                        f"{self._describe(param)} has no values: give the module memory (to_empty()) and initialize it "
                        "before"
                    )
            self._validate_tensors_to_flatten(list(params))
            self._check_memory(list(params))
            return [self._fqn_of[param] for param in params]
        finally:
            del self._fqn_of

    # Copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(self._no_copies)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(self._no_copies)

    @property
    def _no_copies(self) -> str:
        return (
            f"{self._names()} cannot be copied or pickled: it belongs to its process groups; copy the module before it "
            "is flattened, or save the parameters"
        )

    def __repr__(self) -> str:
        return f"layer_zero.FlatParamHandle(flat_param.fqns={self.flat_param._fqns})"

    # Looking things up

    def flatten_tensors(self, tensors: list[Tensor], aligned_numel: int, div: int | None = None) -> Tensor:
        """Concatenate ``tensors`` as the flat parameter is, if ``aligned_numel`` > 0; ``div``: the ranks of zero1."""
        if div not in (None, self.zero1_world_size):
            raise ValueError(self._about(f"expected div to be {self.zero1_world_size}, the ranks of zero1, got {div}"))
        return super().flatten_tensors(tensors, aligned_numel)

    def _named_module_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """What the modules have at the moment, by name."""
        for fqn, info in zip(self.flat_param._fqns, self.flat_param._param_infos, strict=True):
            yield fqn, getattr(info.module, info.param_name)

    def _get_orig_param_by_name(self, total_name: str) -> nn.Parameter | None:
        """The original parameter of that name."""
        return dict(zip(self.flat_param._fqns, self.flat_param._params, strict=True)).get(total_name)

    def _get_module_param_by_name(self, total_name: str) -> Tensor | None:
        """What its module has at the moment of the parameter of that name."""
        return dict(self._named_module_parameters()).get(total_name)

    def _shard_grad_list(self) -> Iterator[Tensor | None]:
        """The gradients of the original parameters."""
        for param in self.flat_param._params:
            yield param.grad
