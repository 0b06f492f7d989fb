"""Claim: packing runs at the speed of memory. 400 segments of 64 KiB into one flat buffer, against memcpy of as much.

fp32 copied: at least 0.8 of memcpy's bandwidth; bf16 added to fp32: at least half of it, in bytes read and written.
Both sides in turn, in one thread; medians of ratios. ``bench_pack.py [rounds]`` prints a line of JSON last.
"""

import ctypes
import json
import statistics
import sys
import time

import torch

from flatparam import _C

SEGMENTS, NUMEL = 400, 16 * 1024  # 64 KiB of fp32 each


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def memory(tensor):
    return memoryview(tensor.view(torch.uint8).numpy())


def measure(rounds):
    """Return {claim: (memcpy's bandwidth in GB/s, ours over memcpy's)}, medians."""
    total = SEGMENTS * NUMEL
    source, flat = torch.randn(total), torch.zeros(total)
    fp32 = [torch.randn(NUMEL) for _ in range(SEGMENTS)]
    bf16 = [tensor.bfloat16() for tensor in fp32]
    into = memory(flat)
    fp32_segments = [(memory(tensor), i * NUMEL, NUMEL) for i, tensor in enumerate(fp32)]
    bf16_segments = [(memory(tensor), i * NUMEL, NUMEL) for i, tensor in enumerate(bf16)]
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    calls = {  # what: (bytes read and written for each element, call)
        "copy fp32": (8, lambda: _C.pack(fp32_segments, "float32", into, "float32", 0, total)),
        "add bf16 to fp32": (10, lambda: _C.pack(bf16_segments, "bfloat16", into, "float32", 0, total, None, True)),
        "add scaled bf16 to fp32": (
            10,
            lambda: _C.pack(bf16_segments, "bfloat16", into, "float32", 0, total, 0.5, True),
        ),
        "cast fp32 to bf16 and back": (
            12,
            lambda: (
                _C.unpack(bf16_segments, "bfloat16", into, "float32", 0, total),
                _C.pack(bf16_segments, "bfloat16", into, "float32", 0, total),
            ),
        ),
    }
    found = {}
    for name, (bytes_each, call) in calls.items():
        pairs = []
        for _ in range(rounds + 3):
            theirs = seconds(lambda: memcpy(flat.data_ptr(), source.data_ptr(), total * 4))
            pairs.append((8 * total / theirs, bytes_each * total / seconds(call)))
        bandwidth = statistics.median(theirs for theirs, _ in pairs[3:]) / 1e9
        found[name] = bandwidth, statistics.median(ours / theirs for theirs, ours in pairs[3:])
    return found


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    results = {}
    for level in _C.simd_levels():
        _C.simd_level(level)
        results[level] = measure(rounds)
        for name, (bandwidth, ratio) in results[level].items():
            print(f"{level:8} {name:27} {ratio:.2f} of memcpy's bandwidth ({bandwidth:.1f} GB/s)")
    print(json.dumps({level: {name: ratio for name, (_, ratio) in found.items()} for level, found in results.items()}))


if __name__ == "__main__":
    main()
