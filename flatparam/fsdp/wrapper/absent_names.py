"""Names of torch's wrapper and handle that the runtime lacks. A read or write raises, and says what to use instead.

Else a write would be lost in silence, because no code reads it. The error is an AttributeError, so ``hasattr`` is
False as for any missing name. ``torch_names.py`` calls this file.
Source: torch 2.13, ``torch/distributed/fsdp/_common_utils.py``, ``_flat_param.py``, ``_init_utils.py``.
"""

from typing import Any

from ...common.torch_private import TorchsFSDP, torch_flat_param

_ELSE = "call flatparam.install() without runtime=True, which keeps torch's class and has it"
_STREAMS = "the runtime waits for its streams itself; torch.accelerator has those of the device"
_FACTORS = "model.placement.factors has them; to divide by others, register_comm_hook(), or scale the loss"
_WHOLE = "use summon_full_params() to have whole parameters, and call the wrapped module to have them in a forward"
_GRADS = "use summon_full_params(with_grads=True) to have whole gradients"
_ORDER = "units are gathered and reduced in their order of forward, which is compared over the ranks by itself"

# Name on torch's wrapper -> how a program gets the same
_OF_WRAPPERS = {
    **dict.fromkeys(("_gradient_predivide_factor", "_gradient_postdivide_factor"), _FACTORS),
    **dict.fromkeys(
        ("_unshard_stream", "_pre_unshard_stream", "_post_backward_stream", "_all_reduce_stream", "_default_stream"),
        _STREAMS,
    ),
    **dict.fromkeys(("_free_event_queue", "_unshard_event", "_device_handle"), _STREAMS),
    **dict.fromkeys(
        ("_exec_order_data", "_pre_forward_handles", "_post_forward_handles", "_root_pre_forward_handles"), _ORDER
    ),
    "_sync_gradients": "use `with model.no_sync():`",
    "_all_fsdp_states": "use FullyShardedDataParallel.fsdp_modules(model)",
    "_handles": "`_handle` is the one that a unit has, `_all_handles` those of all units",
    "_fully_sharded_module_to_handle": "`_all_handles` has them, and each its `_fully_sharded_module`",
    "_ignored_modules": "`_ignored_params` has the parameters that are ignored",
    "_device_mesh": "`model.placement.mesh` has it",
    "_buffer_name_to_orig_dtype": "state_dict() gives buffers in their own dtypes",
    "_reset_lazy_init": "the first forward finds the root, and wrapping a model that has run is allowed",
    "_use_full_prec_in_eval": "set FSDP_USE_FULL_PREC_IN_EVAL=1 before the model is wrapped",
    "_communication_hook": "use register_comm_hook()",
    "_is_using_optim_input": "use optim_state_dict(model, optimizer)",
    "_unshard_params_ctx": _WHOLE,
    "_deregister_orig_params_ctx": _WHOLE,
}
# Names of wrappers and of handles without such advice. torch sets them on objects only, so its classes lack them
_IN_WRAPPERS = (
    *("_buffer_names", "_debug_level", "_fsdp_extension", "_ignored_buffer_names", "_needs_buffer_dtype_restore_check"),
    *("_post_backward_callback_queued", "_zero_scalar"),
)
_IN_HANDLES = (
    *("_aligned_numel", "_debug_level", "_device_handle", "_fsdp_extension", "_get_unflat_views", "_handle_index"),
    *("_has_optim_in_backward", "_low_prec_param_dtype_specified", "_low_prec_reduce_dtype_specified", "_prefetched"),
    *("_needs_pre_backward_unshard", "_needs_pre_forward_unshard", "_post_forward_index", "_pre_forward_order_index"),
    *("_ran_pre_backward_hook", "_setattr_param", "_setattr_tensor", "_skip_writeback_check", "_use_fake_all_gather"),
    *("_unsharded_flat_param_for_skipped_views", "_use_fake_reduce"),
)
_OF_HANDLES = {
    **dict.fromkeys(("unshard", "pre_unshard", "post_unshard", "needs_unshard", "unflatten_as_params"), _WHOLE),
    "_use_unsharded_views": _WHOLE,
    **dict.fromkeys(("post_reshard", "_use_sharded_views", "_free_unsharded_flat_param"), "use `reshard(True)`"),
    **dict.fromkeys(("unshard_grad", "reshard_grad", "_use_unsharded_grad_views", "_use_sharded_grad_views"), _GRADS),
    **dict.fromkeys(
        ("prepare_gradient_for_backward", "prepare_gradient_for_optim"), "gradients are where the optimizer looks"
    ),
    "to_cpu": 'use `flat_param_to("cpu")`, and `flat_param_to(device)` to have it back',
    "shard": "parameters are sharded when they are wrapped",
    "init_flat_param_attributes": "the first forward does all that it does",
    "_keep_low_precision_grads": "`model.mixed_precision.keep_low_precision_grads` has it",
    "_force_full_precision": "summon_full_params() and state_dict() give full precision",
    "_use_full_prec_in_eval": _OF_WRAPPERS["_use_full_prec_in_eval"],
}
ABSENT_NAMES = (*_OF_WRAPPERS, *_IN_WRAPPERS)  # of wrappers: each gets a descriptor


def why_absent(name: str, of_handle: bool = False) -> str | None:
    """The error text for a name that torch's wrapper (or handle) has and ours lacks; None for any other name."""
    ways, others = (_OF_HANDLES, _IN_HANDLES) if of_handle else (_OF_WRAPPERS, _IN_WRAPPERS)
    cls: Any = torch_flat_param.FlatParamHandle if of_handle else TorchsFSDP
    if name.startswith("__") or not (name in ways or name in others or hasattr(cls, name)):
        return None
    whose = "FlatParamHandle" if of_handle else "FullyShardedDataParallel"
    return f"`{name}` is a name inside of torch's {whose}, which flatparam's runtime has not: {ways.get(name, _ELSE)}"


class Absent:
    """The descriptor of an absent name in our class. A descriptor can refuse writes, ``__getattr__`` cannot."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        raise AttributeError(self.name)  # __getattr__() says why

    def __set__(self, instance: Any, value: Any) -> None:
        raise AttributeError(f"cannot set {why_absent(self.name)}")
