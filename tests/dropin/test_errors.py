"""What torch's handle refuses, ours refuses with the same type of error; our message names the parameter or the unit,
and says what was expected and what came.

One row of ``CONDITIONS`` for each condition that torch's ``_flat_param.py`` checks; both handles are driven into it.
"""

import inspect
import re
import types

import pytest
import torch
from gloo import fake_world
from one_handle import TORCHS, outcome
from torch import nn
from torch.distributed.fsdp._common_utils import HandleTrainingState as State
from torch.distributed.fsdp._flat_param import FlatParameter, HandleShardingStrategy

import flatparam

NAMES = ("first.weight", "first.bias", "second.weight", "last.bias")


def module():
    torch.manual_seed(2)
    root = nn.Module()
    root.first = nn.Linear(3, 4)
    root.second = nn.Linear(3, 4, bias=False)
    root.last = nn.Module()
    root.last.bias = root.first.bias
    return root


def make(kind, root=None, params=None, strategy="FULL_SHARD", offload=False, low=None, keep_low=False, orig=True):
    root = module() if root is None else root
    return kind(
        list(root.parameters()) if params is None else params,
        root,
        torch.device("cpu"),
        HandleShardingStrategy[strategy],
        offload,
        low,
        None,
        keep_low,
        torch.distributed.group.WORLD,
        orig,
    )


def ready(kind, **settings):
    """A handle after the runtime's lazy initialisation."""
    handle = make(kind, **settings)
    handle.shard()
    if settings.get("offload"):  # without pinned memory, which needs an accelerator
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
            handle.init_flat_param_attributes()
    else:
        handle.init_flat_param_attributes()
    return handle


def unsharded(kind, state=State.FORWARD, **settings):
    handle = ready(kind, **settings)
    handle._training_state = state
    handle.pre_unshard()
    handle.unshard()
    handle.post_unshard()
    return handle


def after_forward(kind, **settings):
    """A handle that has left forward's views in place."""
    handle = unsharded(kind, strategy="SHARD_GRAD_OP", **settings)
    handle.reshard(False)
    handle._training_state = State.BACKWARD_PRE
    return handle


def constructed(kind, **changed):
    root = module()
    for name, value in changed.items():
        path, leaf = name.rsplit("_", 1)
        setattr(root.get_submodule(path), leaf, value)
    return make(kind, root)


def attributes(handle, **values):
    """Set attributes of the flat parameter, or of the handle if they begin with ``handle_``; returns the handle."""
    for name, value in values.items():
        target, name = (
            (handle, name.removeprefix("handle")) if name.startswith("handle_") else (handle.flat_param, name)
        )
        setattr(target, name, value)
    return handle


def without(handle, name):
    path, _, leaf = name.rpartition(".")
    delattr(getattr(handle, path) if path else handle, leaf)
    return handle


def sharded(handle):
    handle.shard()
    return handle


def meta(*shape):
    return torch.empty(shape, device="meta")


def sized(handle, numel, dtype=None):
    """Give the flat parameter, whatever its size, a gradient of ``numel`` elements."""
    data, flat = handle.flat_param.data, handle.flat_param
    flat.data = torch.zeros(numel, dtype=dtype or data.dtype)
    flat.grad = torch.zeros_like(flat)
    flat.data = data
    return handle


def offset_storage(handle):
    flat = handle.flat_param
    flat.data = torch.zeros(flat.numel() + 1)[1:]
    return handle


def entered(context):
    with context:
        pass


def swapped(handle, name, value):
    path, _, leaf = name.rpartition(".")
    module = handle._fully_sharded_module.get_submodule(path)
    if value is None:
        delattr(module, leaf)
    else:
        module._parameters.pop(leaf, None)
        module.__dict__.pop(leaf, None)
        setattr(module, leaf, value)
    return handle


def freed_views(handle):
    handle._unsharded_flat_param_for_skipped_views.untyped_storage().resize_(0)
    return handle


def forgotten_views(handle):
    handle.flat_param._tensors[0] = None
    return handle


def in_full_precision(handle):
    handle._training_state = State.SUMMON_FULL_PARAMS
    handle.flat_param._full_prec_full_param_padded = handle.flat_param._full_param_padded
    return handle


def setattr_as_tensor(module, name, value):
    module._parameters.pop(name, None)
    module.__dict__[name] = value.detach() if isinstance(value, nn.Parameter) else value


def patched(handle, name, value):
    setattr(handle, name, lambda *args: value)
    return handle


BF16 = torch.bfloat16

# condition: (the error, what drives a handle of class ``kind`` into it, what the message holds besides a name)
CONDITIONS = {
    # Construction
    "no parameters": (ValueError, lambda k: make(k, params=[]), ["empty parameter list"]),
    "nothing to flatten": (
        ValueError,
        lambda k: make(k)._init_flat_param_and_metadata([], module(), 0, True),
        ["non-empty"],
    ),
    "negative alignment": (
        ValueError,
        lambda k: make(k)._init_flat_param_and_metadata([nn.Parameter(torch.ones(1))], module(), -1, True),
        ["non-negative", "-1"],
    ),
    "not in the module": (
        ValueError,
        lambda k: make(k, params=[nn.Parameter(torch.ones(7))]),
        ["not found", "(7,)", "Module"],
    ),
    "a flat parameter": (
        ValueError,
        lambda k: constructed(k, second_weight=FlatParameter(torch.ones(2))),
        ["second.weight", "`FlatParameter`"],
    ),
    "an integer dtype": (
        ValueError,
        lambda k: constructed(k, first_weight=nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)),
        ["first.weight", "integer", "int32"],
    ),
    "two dtypes": (
        ValueError,
        lambda k: constructed(k, second_weight=nn.Parameter(torch.ones(2).double())),
        ["first.weight", "second.weight", "float32", "float64", "uniform dtype"],
    ),
    "two devices": (
        ValueError,
        lambda k: constructed(k, second_weight=nn.Parameter(meta(2))),
        ["first.weight", "second.weight", "cpu", "meta", "same device"],
    ),
    "requires_grad differs": (
        ValueError,
        lambda k: make(k, root=partly_frozen(), orig=False),
        ["first.weight", "first.bias", "requires_grad", "True", "False"],
    ),
    "validate nothing": (AssertionError, lambda k: make(k)._validate_tensors_to_flatten([]), ["non-empty"]),
    "flatten nothing": (ValueError, lambda k: make(k).flatten_tensors([], 0), ["non-empty"]),
    "flatten at a negative alignment": (ValueError, lambda k: make(k).flatten_tensors([torch.ones(2)], -8), ["-8"]),
    # Sharding
    "a part of a storage": (AssertionError, lambda k: offset_storage(make(k)).shard(), ["sole occupant", "offset 1"]),
    "a negative start": (AssertionError, lambda k: make(k)._init_shard_metadata(0, -1, 3), ["-1", "3"]),
    "an end before the start": (AssertionError, lambda k: make(k)._init_shard_metadata(0, 5, 3), ["5", "3"]),
    "more padding than elements": (AssertionError, lambda k: make(k)._init_shard_metadata(999, 0, 3), ["999"]),
    "too few shard infos": (
        AssertionError,
        lambda k: patched(make(k), "_get_shard_metadata", ())._init_shard_metadata(0, 0, 3),
        ["3", "0"],
    ),
    "too few offsets": (
        AssertionError,
        lambda k: patched(make(k), "_get_flat_param_offsets", [(0, 3)])._get_shard_metadata(0, 3),
        ["but got 1"],
    ),
    "the sharded size of a matrix": (
        AssertionError,
        lambda k: k._get_sharded_size(torch.ones(2, 2), 0, 2),
        ["1D", "[2, 2]"],
    ),
    "offloading, not on the CPU": (
        AssertionError,
        lambda k: on_meta(k).init_flat_param_attributes(),
        ["CPU", "meta"],
    ),
    "not on the compute device": (
        AssertionError,
        lambda k: moved(make(k)).init_flat_param_attributes(),
        ["cpu", "meta"],
    ),
    # Unsharding
    "NO_SHARD has no unsharded tensor": (
        AssertionError,
        lambda k: ready(k, strategy="NO_SHARD")._get_padded_unsharded_flat_param(),
        ["sharded strategy"],
    ),
    "unsharded already": (AssertionError, lambda k: unsharded(k)._alloc_padded_unsharded_flat_param(), ["to be freed"]),
    "full precision is low": (
        AssertionError,
        lambda k: in_full_precision(ready(k, low=BF16))._get_padded_unsharded_flat_param(),
        ["full precision", "bfloat16"],
    ),
    "no process group": (
        AssertionError,
        lambda k: without(ready(k), "process_group")._all_gather_flat_param(torch.ones(3)),
        ["process group"],
    ),
    "an output of another size": (AssertionError, lambda k: ready(k)._all_gather_flat_param(torch.ones(3)), ["got 3"]),
    "no low precision": (AssertionError, lambda k: ready(k)._check_low_precision_shard(), ["low precision"]),
    "no low-precision shard": (
        AssertionError,
        lambda k: attributes(ready(k, low=BF16), _mp_shard=None)._check_low_precision_shard(),
        ["_mp_shard"],
    ),
    "the low-precision shard elsewhere": (
        AssertionError,
        lambda k: attributes(ready(k, low=BF16), _mp_shard=meta(3))._check_low_precision_shard(),
        ["cpu", "meta"],
    ),
    "views of what is sharded": (AssertionError, lambda k: ready(k)._use_unsharded_views(True), ["unsharded", "size"]),
    "sharded views of what is unsharded": (
        AssertionError,
        lambda k: unsharded(k)._use_sharded_views(),
        ["sharded", "size"],
    ),
    "a shared parameter of no Parameter": (
        AssertionError,
        lambda k: attributes(unsharded(k), handle_setattr_param=setattr_as_tensor)._use_unsharded_views(True),
        ["last.bias", "nn.Parameter", "Tensor"],
    ),
    # To the CPU
    "NO_SHARD to the CPU": (
        AssertionError,
        lambda k: entered(ready(k, strategy="NO_SHARD").to_cpu()),
        ["sharded strategy"],
    ),
    "what is sharded to the CPU": (AssertionError, lambda k: entered(ready(k).to_cpu()), ["size"]),
    "from elsewhere to the CPU": (AssertionError, lambda k: entered(moved(unsharded(k)).to_cpu()), ["cpu", "meta"]),
    "no view of the padded one to the CPU": (
        AssertionError,
        lambda k: entered(cloned(unsharded(k)).to_cpu()),
        ["view"],
    ),
    # Resharding
    "offloading, the shard not on the CPU": (
        AssertionError,
        lambda k: attributes(ready(k, offload=True), _local_shard=meta(3))._use_sharded_flat_param(),
        ["CPU", "meta"],
    ),
    # Gradients
    "backward in FORWARD": (
        AssertionError,
        lambda k: unsharded(k).prepare_gradient_for_backward(),
        ["BACKWARD_PRE", "FORWARD"],
    ),
    "a gradient of no known size": (
        AssertionError,
        lambda k: sized(unsharded(k, State.IDLE), 5).prepare_gradient_for_backward(),
        ["no_sync", "[5]"],
    ),
    "a gradient elsewhere": (
        AssertionError,
        lambda k: stands_in(unsharded(k, State.IDLE), grad=meta(3)).prepare_gradient_for_backward(),
        ["cpu", "meta"],
    ),
    "no memory for an offloaded gradient": (
        AssertionError,
        lambda k: without(
            stands_in(ready(k, offload=True), grad=meta(14)), "flat_param._cpu_grad"
        ).prepare_gradient_for_backward(),
        ["_cpu_grad"],
    ),
    "the flat parameter elsewhere": (
        AssertionError,
        lambda k: moved(sized(unsharded(k, State.IDLE), 5)).prepare_gradient_for_backward(),
        ["cpu", "meta"],
    ),
    "no reduced gradient": (
        AssertionError,
        lambda k: attributes(ready(k), _post_backward_called=True).prepare_gradient_for_optim(),
        ["_saved_grad_shard"],
    ),
    "a reduced gradient, an unsharded parameter": (
        AssertionError,
        lambda k: attributes(unsharded(k), _saved_grad_shard=torch.ones(3)).prepare_gradient_for_optim(),
        ["sharded", "size"],
    ),
    "an offloaded gradient, the parameter elsewhere": (
        AssertionError,
        lambda k: attributes(sharded(on_meta(k)), _cpu_grad=torch.ones(3)).prepare_gradient_for_optim(),
        ["CPU", "meta"],
    ),
    "a reduced gradient, the parameter elsewhere": (
        AssertionError,
        lambda k: attributes(moved(ready(k)), _saved_grad_shard=torch.ones(3)).prepare_gradient_for_optim(),
        ["cpu", "meta"],
    ),
    "a reduced gradient elsewhere": (
        AssertionError,
        lambda k: attributes(ready(k), _saved_grad_shard=meta(3)).prepare_gradient_for_optim(),
        ["cpu", "meta"],
    ),
    "no gradient to cast": (
        AssertionError,
        lambda k: attributes(
            ready(k, offload=True, low=BF16, keep_low=True), _cpu_grad=None, _post_backward_called=True
        ).prepare_gradient_for_optim(),
        ["None"],
    ),
    "a sharded gradient in backward": (
        AssertionError,
        lambda k: attributes(sized(ready(k), 28), handle_training_state=State.BACKWARD_POST).sharded_grad,
        ["IDLE", "BACKWARD_POST"],
    ),
    "gradient masks before the reduction": (
        AssertionError,
        lambda k: unsharded(k)._reset_is_grad_none(),
        ["BACKWARD_POST", "FORWARD"],
    ),
    "a parameter is gone, gradients": (
        AssertionError,
        lambda k: swapped(
            with_grad(unsharded(k, State.SUMMON_FULL_PARAMS)), "second.weight", None
        )._use_unsharded_grad_views(),
        ["second.weight", "missing"],
    ),
    "a shared parameter is gone, gradients": (
        AssertionError,
        lambda k: swapped(
            with_grad(unsharded(k, State.SUMMON_FULL_PARAMS)), "last.bias", None
        )._use_unsharded_grad_views(),
        ["last.bias", "missing"],
    ),
    "unsharded views of a sharded gradient": (
        AssertionError,
        lambda k: sized(unsharded(k), 3)._use_unsharded_grad_views(),
        ["unsharded", "size", "[3]"],
    ),
    # Writeback
    "another shape": (
        RuntimeError,
        lambda k: swapped(ready(k), "first.weight", nn.Parameter(torch.ones(5)))._writeback_orig_params(),
        ["first.weight", "[12]", "[5]"],
    ),
    "a gradient of another shape": (
        RuntimeError,
        lambda k: with_piece_grad(ready(k), 5)._writeback_orig_params(),
        ["first.weight", "gradient", "[12]", "[5]"],
    ),
    "a matrix": (
        AssertionError,
        lambda k: ready(k)._writeback_tensor(None, torch.ones(4), 0, torch.Size([2, 2]), 0, True),
        ["first.weight", "1D", "[2, 2]"],
    ),
    "a shared parameter changed": (
        NotImplementedError,
        lambda k: swapped(ready(k), "last.bias", nn.Parameter(torch.ones(4)))._writeback_orig_params(),
        ["last.bias", "first.bias"],
    ),
    "changed between forward and backward": (
        AssertionError,
        lambda k: swapped(after_forward(k), "first.weight", nn.Parameter(torch.ones(12)))._writeback_orig_params(),
        ["first.weight", "between forward and backward", "SHARD_GRAD_OP"],
    ),
    "freed between forward and backward": (
        AssertionError,
        lambda k: freed_views(after_forward(k))._writeback_orig_params(),
        ["freed"],
    ),
    "forward's views are gone": (
        AssertionError,
        lambda k: forgotten_views(after_forward(k))._writeback_orig_params(),
        ["first.weight", "views"],
    ),
    # Checks
    "check: sharded strategy": (
        AssertionError,
        lambda k: make(k, strategy="NO_SHARD")._check_sharded_strategy(),
        ["sharded strategy", "NO_SHARD"],
    ),
    "check: compute device": (AssertionError, lambda k: make(k)._check_on_compute_device(meta(2)), ["cpu", "meta"]),
    "check: CPU": (AssertionError, lambda k: make(k)._check_on_cpu(meta(2)), ["CPU", "meta"]),
    "check: freed": (AssertionError, lambda k: make(k)._check_storage_freed(torch.ones(2)), ["freed", "size > 0"]),
    "check: allocated": (AssertionError, lambda k: make(k)._check_storage_allocated(emptied()), ["allocated", "freed"]),
    "check: unsharded, None": (AssertionError, lambda k: ready(k)._check_unsharded(None), ["unsharded", "`None`"]),
    "check: unsharded, size": (AssertionError, lambda k: ready(k)._check_unsharded(torch.ones(3)), ["[28]", "[3]"]),
    "check: sharded, None": (AssertionError, lambda k: ready(k)._check_sharded(None), ["sharded", "`None`"]),
    "check: sharded, size": (AssertionError, lambda k: ready(k)._check_sharded(torch.ones(3)), ["[14]", "[3]"]),
}
# There is no unit yet, or a static method knows of none
WITHOUT_A_NAME = {
    *("no parameters", "nothing to flatten", "negative alignment", "not in the module", "the sharded size of a matrix"),
    *("validate nothing", "flatten nothing", "flatten at a negative alignment", "check: freed", "check: allocated"),
}


def partly_frozen():
    root = module()
    root.first.bias.requires_grad_(False)
    return root


def moved(handle):
    """Let the flat parameter be on another device than the handle's."""
    handle.device = torch.device("meta")
    return handle


def on_meta(kind):
    return make(kind, root=module().to("meta"), offload=True)


def stands_in(handle, **values):
    """Replace the flat parameter by an object with its attributes: autograd refuses gradients on other devices."""
    flat = handle.flat_param
    own = {"device": flat.device, "grad": flat.grad, "size": flat.size, "data": flat.data}
    handle.flat_param = types.SimpleNamespace(**(vars(flat) | own | values))
    return handle


def cloned(handle):
    handle.flat_param.data = handle.flat_param.data.clone()
    return handle


def emptied():
    tensor = torch.ones(2)
    tensor.untyped_storage().resize_(0)
    return tensor


def with_grad(handle):
    handle.flat_param.grad = torch.ones_like(handle.flat_param)
    return handle


def with_piece_grad(handle, numel):
    parameter = handle.flat_param._params[0]
    data = parameter.data
    parameter.data = torch.ones(numel)
    parameter.grad = torch.ones(numel)
    parameter.data = data
    return handle


@pytest.mark.parametrize("condition", CONDITIONS)
def test_the_error_is_torchs_and_says_more(condition):
    error, drive, needles = CONDITIONS[condition]
    raised = []
    for kind in (TORCHS, flatparam.FlatParamHandle):
        with fake_world(2):
            raised.append(outcome(drive, kind)[1])
    torchs, ours = raised
    assert type(torchs) is error, f"torch: {torchs!r}"
    assert type(ours) is error, f"ours: {ours!r}"
    message = str(ours)
    for needle in needles:
        assert needle in message
    if condition not in WITHOUT_A_NAME:
        assert any(name in message for name in NAMES), message


# Those of torch's methods that check something. Not driven above: dtypes that are None, lengths of tuples made a line
# earlier, offsets and chunks that arithmetic rules out, attributes that are None without use_orig_params (both
# handles then fail where they use them), what comes back from the CPU (on a CPU nothing goes there)
CHECKING = {
    *("__init__", "_init_flat_param_and_metadata", "_validate_tensors_to_flatten", "flatten_tensors"),
    *("_init_param_reduce_dtypes", "shard", "_init_shard_metadata", "_get_shard_metadata", "_get_unpadded_shard"),
    *("_get_sharded_size", "init_flat_param_attributes", "_get_padded_unsharded_flat_param", "_all_gather_flat_param"),
    *("prepare_gradient_for_backward", "prepare_gradient_for_optim", "to_cpu", "_use_sharded_flat_param"),
    *("_use_unsharded_views", "_use_unsharded_grad_views", "_use_sharded_views", "_use_sharded_grad_views"),
    *("_writeback_orig_params", "_writeback_tensor", "_reset_flat_param_grad_info_if_needed", "sharded_grad"),
    *("_reset_is_grad_none", "_check_sharded_strategy", "_check_on_compute_device", "_check_on_cpu"),
    *("_check_storage_freed", "_check_storage_allocated", "_check_low_precision_shard", "_check_unsharded"),
    *("_check_sharded", "_restore_unsharded_flat_param_from_cpu"),
}


def test_no_other_method_of_torchs_raises():
    """A torch release that checks more needs more rows."""
    raising = set()
    for name, value in vars(TORCHS).items():
        function = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", value))
        if inspect.isfunction(function) and re.search(r"^ +(raise |_p_assert\()", inspect.getsource(function), re.M):
            raising.add(name)
    assert raising == CHECKING & vars(TORCHS).keys()
