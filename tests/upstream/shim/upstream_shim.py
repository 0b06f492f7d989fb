"""Lets PyTorch's own FSDP1 tests, written for GPUs, run on the CPU with gloo, on torch's handle or on flatparam's.

Nothing on disk is changed. All happens on import: a hook runs right after each module of ``HOOKS`` (pretended devices,
the decorators that skip without GPUs, pinned memory, ``flatparam.install()``), and the test modules are compiled from
what ``upstream_rewriter`` makes of them.

Environment, set by the runner: UPSTREAM_TESTS: the folder of torch's tests; UPSTREAM_DEVICES: pretended devices;
UPSTREAM_WORLD: ranks of test classes that set no number; UPSTREAM_START: fork or spawn the ranks; UPSTREAM_HANDLE:
flatparam, or torch for torch's own handle.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

FLAT_PARAM = "torch.distributed.fsdp._flat_param"


def activate():
    """Put the hooks in place, in a process that has not imported torch yet."""
    sys.meta_path.insert(0, _Finder())


def handle_in_use():
    """The file of the constructor of torch's ``FlatParamHandle``, or with flatparam's runtime of the class that has the
    name of torch's; raises if it is not the one asked for."""
    if os.environ["UPSTREAM_HANDLE"] == "runtime":
        cls = sys.modules["torch.distributed.fsdp"].FullyShardedDataParallel
        if not cls.__module__.startswith("flatparam."):
            raise RuntimeError(
                f"expected flatparam's runtime in the place of torch's class, got that of {cls.__module__}"
            )
        return os.path.realpath(cls.__init__.__code__.co_filename)
    handle = sys.modules[FLAT_PARAM].FlatParamHandle
    others = [
        name
        for name, module in sorted(sys.modules.items())
        if name.startswith("torch.distributed.") and getattr(module, "FlatParamHandle", handle) is not handle
    ]
    file = os.path.realpath(handle.__init__.__code__.co_filename)
    is_torchs = file == os.path.realpath(sys.modules[FLAT_PARAM].__file__)
    if others or is_torchs != (os.environ["UPSTREAM_HANDLE"] == "torch"):
        raise RuntimeError(
            f"expected the handle of {os.environ['UPSTREAM_HANDLE']} everywhere in torch.distributed, "
            f"got that of {file}, and another one in {others}"
        )
    return file


def _devices():
    return int(os.environ["UPSTREAM_DEVICES"])


# Hooks: each gets the module that has just been imported


def _after_torch(torch):
    torch.cpu.device_count = _devices
    torch.cpu.memory_summary = lambda *args, **kwargs: ""
    for name in ("synchronize", "record_event", "wait_event", "wait_stream", "query"):
        if name not in vars(torch.cpu.Stream):
            setattr(torch.cpu.Stream, name, lambda self, *args, **kwargs: None)

    # A CPU build cannot pin memory; a GPU's pin_memory() returns a new tensor. Streams of the CPU record nothing.
    torch.Tensor.pin_memory = lambda self, device=None: self.detach().clone()
    record_stream = torch.Tensor.record_stream
    torch.Tensor.record_stream = lambda self, stream: None if self.is_cpu else record_stream(self, stream)

    dist = torch.distributed
    all_gather = dist.all_gather

    def all_gather_of_one_buffer(tensor_list, tensor, group=None, async_op=False):
        """FSDP gathers CPU tensors as chunks of one buffer, GPU tensors by one call, which tests count or replace."""
        buffer = _one_buffer(torch, tensor_list, tensor)
        if buffer is None or dist.get_backend(group) != "gloo":  # the tests' threaded group has no such call
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(buffer, tensor, group, async_op)

    dist.all_gather = all_gather_of_one_buffer

    if os.environ["UPSTREAM_HANDLE"] != "torch":
        import flatparam

        flatparam.install(runtime=os.environ["UPSTREAM_HANDLE"] == "runtime")


def _one_buffer(torch, chunks, like):
    """The 1-D tensor that these CPU tensors are the equal chunks of, in order; None if there is no such."""
    if type(chunks) is not list or not chunks or type(like) is not torch.Tensor or not like.is_cpu:
        return None
    first, length = chunks[0], chunks[0].numel()
    if length == 0:
        return None
    for index, chunk in enumerate(chunks):
        fits = type(chunk) is torch.Tensor and chunk.shape == (length,) and chunk.dtype == like.dtype
        if not (
            fits
            and chunk.is_contiguous()
            and chunk.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and chunk.storage_offset() == first.storage_offset() + index * length
        ):
            return None
    return first.detach().as_strided((length * len(chunks),), (1,), first.storage_offset())


def _after_common_distributed(module):
    def skip_if_lt_x_gpu(least, *, allow_cpu=False):
        def decorator(test):
            @functools.wraps(test)
            def run_or_skip(*args, **kwargs):
                if _devices() >= least:
                    return test(*args, **kwargs)
                skip = module.TEST_SKIPS[f"multi-gpu-{least}"]
                if not module._maybe_handle_skip_if_lt_x_gpu(args, skip.message):
                    sys.exit(skip.exit_code)

            return run_or_skip

        return decorator

    module.skip_if_lt_x_gpu = skip_if_lt_x_gpu
    module.at_least_x_gpu = lambda least: _devices() >= least
    module.skip_if_no_gpu = lambda test: test
    module.requires_nccl = lambda: lambda test: test
    module.requires_nccl_version = lambda version, message: lambda test: test

    if os.environ["UPSTREAM_START"] == "fork":  # ten times faster: the ranks need not import torch
        import torch.multiprocessing

        process = torch.multiprocessing.get_context("fork").Process
        module.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(process)


def _after_common_fsdp(module):
    import torch

    module.DEVICE_COUNT = int(os.environ["UPSTREAM_WORLD"])
    mixin = getattr(module, "FSDPTestMixin", module.FSDPTest)
    # The mixin's _run knows about the CPU; FSDPTest's own copy of it always asks for accelerators.
    if mixin is not module.FSDPTest and "_run" in vars(module.FSDPTest) and "_run" in vars(mixin):
        del module.FSDPTest._run

    # Mixed-precision tests compare with DDP under autocast by CUDA's rules: float16, with losses in float32.
    torch.set_autocast_dtype("cpu", torch.float16)

    def in_float32(get_loss):
        def get_loss_in_float32(self, input, output):
            return get_loss(self, input, output.float() if torch.is_autocast_enabled("cpu") else output)

        return get_loss_in_float32

    for model in (module.TransformerWithSharedParams, module.NestedWrappedModule):
        model.get_loss = in_float32(model.get_loss)

    test_parity = mixin._test_fsdp_parity

    def test_parity_but(self, model_class, fsdp_init_mode, device_init_mode, *args, **kwargs):
        """Without the combinations where torch on the CPU cannot do what it does on a GPU; the others still count."""
        offload = kwargs.get("cpu_offload")
        if offload is not None and offload.offload_params:
            if device_init_mode == module.DEVICEInitMode.DEVICE_AFTER:
                return  # expects an error because offloaded parameters were moved to the GPU
            by_default = kwargs.get("sharding_strategy") in (None, module.ShardingStrategy.FULL_SHARD)
            if kwargs.get("use_orig_params") and by_default and type(self).__name__.startswith("TestParityWithDDP"):
                return  # torch adds the last step's gradients to the next one's
        test_parity(self, model_class, fsdp_init_mode, device_init_mode, *args, **kwargs)

    mixin._test_fsdp_parity = test_parity_but
    handle_in_use()


def _after_init_utils(module):
    init_device_handle = module._init_device_handle

    def init_device_handle_or_cpu(state, *args):
        try:
            return init_device_handle(state, *args)
        except RuntimeError as error:
            if "needs a non-CPU accelerator" not in str(error):
                raise
        import torch

        state._device_handle = module._FSDPDeviceHandle.from_device(torch.device("cpu"))
        return state

    module._init_device_handle = init_device_handle_or_cpu
    # It refuses sync_module_states=True with parameters on the CPU, which is the compute device here.
    module._check_module_states_for_sync_module_states = lambda module_states: None


def _after_sharded_grad_scaler(module):
    init = module.ShardedGradScaler.__init__
    init.__defaults__ = tuple("cpu" if default == "cuda" else default for default in init.__defaults__)


HOOKS = {
    "torch": _after_torch,
    "torch.testing._internal.common_distributed": _after_common_distributed,
    "torch.testing._internal.common_fsdp": _after_common_fsdp,
    "torch.distributed.fsdp._init_utils": _after_init_utils,
    "torch.distributed.fsdp.sharded_grad_scaler": _after_sharded_grad_scaler,
}


# Imports


class _HookLoader(importlib.abc.Loader):
    """Another loader, with a hook after it."""

    def __init__(self, loader, hook):
        self._loader, self._hook = loader, hook

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        self._hook(module)


class _TestLoader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):  # no .pyc: the code differs from what the file says
        import upstream_rewriter

        tree = upstream_rewriter.parse_for_cpu(self.get_data(self.path), self.path)
        return compile(tree, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        hook = HOOKS.get(fullname)
        if hook is not None:
            return self._find_with_hook(hook, fullname, path, target)
        if fullname.startswith("test_"):
            spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
            root = os.path.realpath(os.environ["UPSTREAM_TESTS"])
            if spec is not None and spec.origin and os.path.realpath(spec.origin).startswith(root + os.sep):
                loader = _TestLoader(fullname, spec.origin)
                return importlib.util.spec_from_file_location(fullname, spec.origin, loader=loader)
        return None

    def _find_with_hook(self, hook, fullname, path, target):
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                spec.loader = _HookLoader(spec.loader, hook)
                return spec
        return None
