"""The device that the tests of tests/gpu run on: CUDA where FLATPARAM_TEST_DEVICE says so, else the simulated one.

Each has the same methods, so that whatever is tested on a GPU has been run on the simulated device before.
"""

import concurrent.futures
import contextlib
import ctypes
import functools
import os
import threading

import gloo
import simulated
import staged
import torch
import torch.distributed as dist

ON_CUDA = os.environ.get("FLATPARAM_TEST_DEVICE", "sim") == "cuda"
STAND_IN = "STAND_IN_OPERATIONS" in os.environ  # tests/cuda_stand_in: CUDA without a GPU


@functools.cache
def use(library):
    """The device of this rank. ``library``: what ``build()`` has returned."""
    return _Cuda(library) if ON_CUDA else _Simulated(library)


def build():
    """The simulated device; on CUDA, where ranks may share a GPU, their collectives."""
    return str(staged.build() if ON_CUDA else simulated.build())


def new_world(here, on_host):
    """The world of this process anew, with collectives of the device. ``on_host``: of host memory, too."""
    store = dist.PrefixStore(f"with {here.device.type}", dist.distributed_c10d._get_default_store())
    gloo.meet_again(store, here.backend(dist.get_world_size(), on_host))


def shared(ranks):
    """Whether so many ranks have fewer GPUs."""
    return ON_CUDA and ranks > torch.cuda.device_count()


class _Cuda:
    def __init__(self, library):
        if shared(dist.get_world_size()):
            staged.use(library, "cuda")
        self.device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        torch.backends.cuda.matmul.allow_tf32 = False
        self.broken = []
        for dtype in (torch.float32, torch.bfloat16):  # cuBLAS takes its memory, in the threads of forward and backward
            layer = torch.nn.Linear(64, 64, device=self.device, dtype=dtype)
            layer(torch.ones(64, 64, device=self.device, dtype=dtype)).sum().backward()

    def new_group(self, ranks=None, on_host=False):
        size = dist.get_world_size() if ranks is None else len(ranks)
        return dist.new_group(ranks, backend=self.backend(size, on_host))

    def backend(self, size, on_host):
        backend = "cuda:staged" if shared(size) else "cuda:nccl"
        return f"cpu:gloo,{backend}" if on_host else backend

    @contextlib.contextmanager
    def no_host_waits(self):
        before = self._waits()
        torch.cuda.set_sync_debug_mode("error")  # which sees those of torch's operations alone
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert self._waits() == before, f"the host has waited {self._waits() - before} times"

    def _waits(self):
        """All of the host's waits so far, where they are counted; staged collectives have some of their own."""
        return ctypes.CDLL(None).stand_in_waits() if STAND_IN and not shared(dist.get_world_size()) else 0

    def synchronize(self):
        torch.cuda.synchronize()

    def empty_cache(self):
        torch.cuda.empty_cache()

    def drop_workspaces(self):
        """Which cuBLAS has for each stream that it was used on, also by a capture that failed."""
        torch._C._cuda_clearCublasWorkspaces()

    def allocations(self):
        """How often the device itself was asked for memory."""
        return torch.cuda.memory_stats()["num_device_alloc"]

    def bytes(self):
        """(now, at most since the last ``reset_peak()``)."""
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()

    def reset_peak(self):
        torch.cuda.reset_peak_memory_stats()

    def reserved_over_allocated(self):
        return torch.cuda.max_memory_reserved() / torch.cuda.max_memory_allocated()

    def captured(self, call):
        """What replays ``call``, of which nothing is run yet."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    @contextlib.contextmanager
    def captured_beside(self):
        """Another thread captures a graph meanwhile, which nothing that this one does may spoil."""
        value, graph, stream = torch.zeros(4, device=self.device), torch.cuda.CUDAGraph(), torch.cuda.Stream()
        begun, ended = threading.Event(), threading.Event()

        def capture():
            try:
                with torch.cuda.stream(stream):  # not torch.cuda.graph: that frees all memory that is kept
                    graph.capture_begin(capture_error_mode="global")
                    value.add_(1)
                    begun.set()
                    ended.wait(60)
                    graph.capture_end()
            finally:
                begun.set()

        with concurrent.futures.ThreadPoolExecutor() as pool:
            capturing = pool.submit(capture)
            begun.wait()
            try:
                yield
            finally:
                ended.set()
            capturing.result()
        graph.replay()
        assert value.tolist() == [1] * 4

    def broken_capture(self, call, *arguments):
        """Capture a call that raises or spoils the graph: nothing of it is ever run."""
        self.broken.append(graph := torch.cuda.CUDAGraph())  # torch 2.11 goes on using one whose capture could not end
        with torch.cuda.stream(torch.cuda.current_stream()):  # and leaves its stream then
            try:
                with torch.cuda.graph(graph):
                    call(*arguments)
            except (ZeroDivisionError, RuntimeError):
                return
        raise AssertionError("it was captured")

    def registered(self, group, numel):
        """Memory that ``group`` communicates from without a copy, where this torch and NCCL can; why not, or None."""
        backend = group._get_backend(self.device)
        dist.all_reduce(torch.zeros((), device=self.device), group=group)  # else there is no communicator yet
        try:
            pool = torch.cuda.MemPool(backend.mem_allocator)
            with torch.cuda.use_mem_pool(pool):
                memory = torch.zeros(numel, device=self.device)
            backend.register_mem_pool(pool)
        except (AttributeError, RuntimeError) as error:
            return torch.zeros(numel, device=self.device), None, f"memory could not be registered: {error}"
        return memory, pool, None


class _Simulated:
    def __init__(self, library):
        self.module = simulated.use(library)
        self.device = torch.device("sim", 0)

    def new_group(self, ranks=None, on_host=False):
        return simulated.new_group(ranks, on_host)

    def backend(self, size, on_host):
        return simulated.backend(on_host)

    @contextlib.contextmanager
    def no_host_waits(self):
        before = self.module.waits()
        yield
        assert self.module.waits() == before, self.module.waits() - before

    def synchronize(self):
        self.module.synchronize()

    def empty_cache(self):
        pass

    def drop_workspaces(self):
        pass

    def allocations(self):
        return self.module.allocations()

    def bytes(self):
        now, peak, _ = self.module.memory()
        return now, peak

    def reset_peak(self):
        self.module.reset_peak()

    def reserved_over_allocated(self):
        return 1.0  # blocks are as large as what is asked for

    def captured(self, call):
        return call

    @contextlib.contextmanager
    def captured_beside(self):
        """As if: what CUDA forbids meanwhile raises here."""
        from benchmarks.c_testing import _C_testing

        _C_testing.host_kernels(True)  # who can spare captures
        self.module.captured_beside(_C_testing.is_relaxed())
        try:
            yield
        finally:
            self.module.captured_beside(0)
            _C_testing.host_kernels(False)

    def broken_capture(self, call, *arguments):
        """What is called runs here, and nobody may wait for it later."""
        self.synchronize()
        self.module.capturing(True)
        with contextlib.suppress(ZeroDivisionError, RuntimeError):
            call(*arguments)
            raise AssertionError("it raised nothing")
        self.synchronize()
        self.module.capturing(False)

    def registered(self, group, numel):
        return torch.zeros(numel, device=self.device), None, "nothing registers memory of the simulated device"
