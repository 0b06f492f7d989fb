"""The types of the C extension. What its functions do is told by their docstrings and by the headers in csrc."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, SupportsFloat, SupportsIndex, final

import torch
import torch.nn as nn

_Buffer = bytes | bytearray | memoryview  # or anything else with the buffer protocol
_Dtype = Literal["float64", "float32", "bfloat16", "float16"]
_Segments = Iterable[tuple[_Buffer | None, SupportsIndex, SupportsIndex]]

class ShardError(ValueError): ...

@final
class Layout:
    def __new__(
        cls,
        numels: Iterable[SupportsIndex],
        world_size: SupportsIndex,
        itemsize: SupportsIndex,
        alignment: SupportsIndex,
        /,
    ) -> Layout: ...
    @property
    def world_size(self) -> int: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def alignment(self) -> int: ...
    @property
    def numel(self) -> int: ...
    @property
    def numel_params(self) -> int: ...
    @property
    def shard_numel(self) -> int: ...
    @property
    def padded_numel(self) -> int: ...
    @property
    def starts(self) -> tuple[int, ...]: ...
    @property
    def numels(self) -> tuple[int, ...]: ...
    @property
    def numels_with_padding(self) -> tuple[int, ...]: ...
    @property
    def is_padding_mask(self) -> tuple[bool, ...]: ...
    def shard_range(self, rank: SupportsIndex, /) -> tuple[int, int]: ...
    def params_in(self, begin: SupportsIndex, end: SupportsIndex, /) -> tuple[int, int]: ...
    def parts(self, begin: SupportsIndex, end: SupportsIndex, /) -> list[tuple[int, int, int, int]]: ...

@final
class Unit:
    def __new__(
        cls,
        parameters: Iterable[tuple[nn.Module, str, Sequence[int], Sequence[int] | None, int]],
        shared: Iterable[tuple[nn.Module, str, int]],
        numel: int,
    ) -> Unit: ...
    def views(self, flat: torch.Tensor, /) -> list[torch.Tensor]: ...
    def flatten(self, tensors: Iterable[torch.Tensor], fill: float, /) -> torch.Tensor: ...
    def register_tensors(self, tensors: Iterable[torch.Tensor], listed: bool, unsafe: bool, /) -> None: ...
    def register_parameters(
        self, params: Iterable[nn.Parameter], shared: Iterable[nn.Parameter], unsafe: bool, /
    ) -> None: ...
    def point(
        self, tensors: Iterable[torch.Tensor], flat: torch.Tensor, shared: Iterable[torch.Tensor] = (), /
    ) -> None: ...
    def point_pieces(
        self,
        params: Iterable[torch.Tensor],
        shared: Iterable[torch.Tensor],
        shard: torch.Tensor,
        infos: tuple[Sequence[Any], ...],
        /,
    ) -> None: ...
    def scan(
        self,
        params: Iterable[torch.Tensor | None],
        owner: torch.Tensor,
        grad: torch.Tensor | None,
        infos: tuple[Sequence[Any], ...],
        /,
    ) -> list[int]: ...
    def set_grads(self, grad: torch.Tensor, /) -> None: ...
    def set_grad_pieces(
        self,
        params: Iterable[torch.Tensor],
        grad: torch.Tensor,
        none_mask: Iterable[bool],
        by_data: bool,
        infos: tuple[Sequence[Any], ...],
        /,
    ) -> None: ...

def is_plain(*tensors: object) -> bool: ...
def resize_storage(tensor: torch.Tensor, numel: int, reason: str | None = None, /) -> None: ...
def storage_numel(tensor: torch.Tensor, /) -> int: ...
def same_storage(a: torch.Tensor, b: torch.Tensor, /) -> bool: ...
def clear_grads(params: Iterable[torch.Tensor], /) -> None: ...
def grad_summary(params: Iterable[torch.Tensor], /) -> tuple[bool, bool]: ...
def shard_of_rank(numel: SupportsIndex, world_size: SupportsIndex, rank: SupportsIndex, /) -> tuple[int, int, int]: ...
def ranks_of_range(
    numel: SupportsIndex, world_size: SupportsIndex, begin: SupportsIndex, end: SupportsIndex, /
) -> list[tuple[int, int, int, int]]: ...
def boxes_of_range(
    shape: Iterable[SupportsIndex], begin: SupportsIndex, end: SupportsIndex, /
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]: ...
def next_state(state: str, event: str, /) -> str: ...
def pack(
    segments: _Segments,
    segment_dtype: _Dtype,
    flat: _Buffer,
    flat_dtype: _Dtype,
    begin: SupportsIndex,
    end: SupportsIndex,
    scale: SupportsFloat | None = None,
    accumulate: bool = False,
    fill: SupportsFloat = 0.0,
    /,
) -> None: ...
def unpack(
    segments: _Segments,
    segment_dtype: _Dtype,
    flat: _Buffer,
    flat_dtype: _Dtype,
    begin: SupportsIndex,
    end: SupportsIndex,
    scale: SupportsFloat | None = None,
    accumulate: bool = False,
    /,
) -> None: ...
def pack_raw(
    segments: _Segments,
    item_bytes: SupportsIndex,
    flat: _Buffer,
    begin: SupportsIndex,
    end: SupportsIndex,
    fill: _Buffer | None = None,
    /,
) -> None: ...
def unpack_raw(
    segments: _Segments, item_bytes: SupportsIndex, flat: _Buffer, begin: SupportsIndex, end: SupportsIndex, /
) -> None: ...
def simd_levels() -> list[str]: ...
def simd_level(name: str | None = None, /) -> str: ...
def alloc_fail_at(k: SupportsIndex, /) -> None: ...
def alloc_live() -> int: ...
