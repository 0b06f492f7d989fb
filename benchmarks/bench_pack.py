"""p. Packing runs at the speed of memory: 400 segments of 64 KiB into one flat buffer, against memcpy of as much.

fp32 copied: at least 0.8 of memcpy's bandwidth; bf16 added to fp32: at least half of it, in bytes read and written.
Both sides in turn, in one thread; medians of ratios.
"""

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import main
from benchmarks.c_testing import _C_testing
from benchmarks.rows import Row, Table

SEGMENTS, NUMEL = 400, 16 * 1024  # 64 KiB of fp32 each
CLAIMS = {"copy fp32": 0.8, "add bf16 to fp32": 0.5, "add scaled bf16 to fp32": 0.5}  # on the best level


def measure(quick: bool) -> Table:
    """GB/s of each kind of packing on each level of instructions, and its ratio to memcpy's."""
    torch.set_num_threads(1)
    table = Table("p", "packing 25 MiB in 400 segments", "GB/s of bytes read and written; ratios to memcpy's, medians")
    levels, before = _C_testing.simd_levels(), _C_testing.simd_level()
    for level in levels:
        _C_testing.simd_level(level)
        for name, pairs in _measure(15 if quick else 60).items():
            ratios = sorted(ours / theirs for theirs, ours in pairs)
            row = Row(
                name,
                level,
                "GB/s",
                "memcpy",
                {
                    "flatparam": statistics.median(ours for _, ours in pairs) / 1e9,
                    "memcpy": statistics.median(theirs for theirs, _ in pairs) / 1e9,
                },
                {"flatparam": (statistics.median(ratios), ratios[0], ratios[-1])},
            )
            if level == levels[-1] and name in CLAIMS:
                row.target, row.met = f">= {CLAIMS[name]}", row.ratios["flatparam"][0] >= CLAIMS[name]
            table.rows.append(row)
    _C_testing.simd_level(before)
    return table


def _measure(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """{kind of packing: (memcpy's, our) bytes a second in each round}."""
    total = SEGMENTS * NUMEL
    source, flat = torch.randn(total), torch.zeros(total)
    fp32 = [torch.randn(NUMEL) for _ in range(SEGMENTS)]
    bf16 = [tensor.bfloat16() for tensor in fp32]
    into, low = _memory(flat), _memory(flat.bfloat16())
    fp32_segments = [(_memory(tensor), i * NUMEL, NUMEL) for i, tensor in enumerate(fp32)]
    bf16_segments = [(_memory(tensor), i * NUMEL, NUMEL) for i, tensor in enumerate(bf16)]
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

    def there_and_back() -> None:
        _C_testing.pack(fp32_segments, "float32", low, "bfloat16", 0, total)
        _C_testing.pack(bf16_segments, "bfloat16", into, "float32", 0, total)

    calls: dict[str, tuple[int, Callable[[], Any]]] = {  # (bytes read and written for each element, call)
        "copy fp32": (8, lambda: _C_testing.pack(fp32_segments, "float32", into, "float32", 0, total)),
        "add bf16 to fp32": (
            10,
            lambda: _C_testing.pack(bf16_segments, "bfloat16", into, "float32", 0, total, None, True),
        ),
        "add scaled bf16 to fp32": (
            10,
            lambda: _C_testing.pack(bf16_segments, "bfloat16", into, "float32", 0, total, 0.5, True),
        ),
        "cast fp32 to bf16 and back": (12, there_and_back),
    }
    found = {}
    for name, (bytes_each, call) in calls.items():
        pairs = []
        for _ in range(rounds + 3):
            theirs = _seconds(lambda: memcpy(flat.data_ptr(), source.data_ptr(), total * 4))
            pairs.append((8 * total / theirs, bytes_each * total / _seconds(call)))
        found[name] = pairs[3:]
    return found


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _memory(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)


if __name__ == "__main__":
    main.run_one(measure)
