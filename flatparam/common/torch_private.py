"""Every name that flatparam takes from torch's private modules. No other file imports them.

A new release of torch may move or drop any of them; adapt this file then. torch's wrapper class is here too: its public
name refers to flatparam's class while that is installed.
"""
# ruff: noqa: F401

import contextlib
import functools
from collections.abc import Iterator

import torch
import torch.distributed.fsdp._flat_param as torch_flat_param
import torch.distributed.fsdp._fsdp_extensions as torch_extensions
import torch.distributed.fsdp._traversal_utils as torch_traversal
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import TracingContext
from torch.autograd import _engine_run_backward
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed._functional_collectives import is_torchdynamo_compiling
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import _init_utils, _optim_utils
from torch.distributed.fsdp._common_utils import (
    TrainingState,
    _FSDPDeviceHandle,
    _is_fsdp_flattened,
    _named_parameters_with_duplicates,
    _no_dispatch_record_stream,
    _override_module_mixed_precision,
    _set_fsdp_flattened,
)
from torch.distributed.fsdp._exec_order_utils import _ExecOrderData
from torch.distributed.fsdp._flat_param import (
    _FLAT_PARAM_PADDING_VALUE,
    _FSDP_USE_UNSAFE_SETATTR,
    NO_RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES,
    FakeProcessGroup,
    FlatParameter,
    FlatParamShardMetadata,
    FSDPExtensions,
    HandleShardingStrategy,
    HandleTrainingState,
    ParamInfo,
    SharedParamInfo,
    _construct_padding_tensor,
    _convert_to_params,
    _detach_if_needed,
    _ext_pre_flatten_transform,
    _FlatParameterMeta,
    _get_aligned_numel,
    _get_dtype_size,
    _safe_setattr_tensor_or_param,
    _ShardParamInfo,
    _unsafe_setattr_param,
    _unsafe_setattr_tensor,
    _warn_skip_writeback_check,
    _warn_use_fake_all_gather,
    _warn_use_fake_reduce,
    logger,
)
from torch.distributed.fsdp._limiter_utils import _FreeEventQueue
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor
from torch.distributed.fsdp._unshard_param_utils import _register_flat_param
from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as TorchsFSDP
from torch.distributed.fsdp.wrap import _Policy
from torch.distributed.utils import _alloc_storage, _free_storage, _p_assert
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils import _pytree
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils.checkpoint import _StopRecomputationError

from .patches import FOR_GOOD, note


@functools.cache
def leave_out_of_graphs() -> None:
    """Let torch.compile skip flatparam's files, as it skips torch's FSDP. Called for the first wrapped model.

    This imports Dynamo, which takes a third of the time of ``import torch``; torch's optimizers import it anyway.
    """
    import torch._dynamo.trace_rules as rules

    for folder in ("common", "dropin", "fsdp", "layer_zero"):
        rules.add(f"flatparam.{folder}")


note(
    FOR_GOOD,
    ["torch._dynamo.trace_rules:add"],
    leave_out_of_graphs.__doc__,
    "tests/fsdp/unit/test_fsdp_compile.py",
    "None is needed: the entries are flatparam's own folders.",
)


# Whether a transform of torch.func is in force. It does not ask for the interpreter stack: that call creates one, and
# autograd then copies it for each node
in_transform = functools.partial(
    torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
)


@contextlib.contextmanager
def outside_of_transforms() -> Iterator[None]:
    """Run the block as if no transform of torch.func were in force."""
    if not in_transform():
        yield
        return
    with temporarily_clear_interpreter_stack():
        yield
