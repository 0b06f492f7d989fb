"""Wrapping by torch's runtime: the shard is filled straight from the original parameters.

Between construction and ``shard()`` the unsharded flat parameter exists, and whoever drives a handle may use it.
torch's runtime constructs and shards in one function, where nobody can look: there the flat parameter's memory is never
written, so that it takes none where memory is committed on first touch (the host's, on Linux), and ``shard()`` copies
this rank's part from the originals. The peak is the shard over what the module takes, and only a W-th is copied.
"""

import functools
import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from .. import _C
from ..common.torch_private import _FLAT_PARAM_PADDING_VALUE, _init_utils
from .base import HandleBase
from .overrides import STREAM

_construct_and_shard = _init_utils._init_param_handle_from_params


class _Here(threading.local):
    constructs_and_shards = False  # this thread is in that function, and has not constructed a handle yet


_here = _Here()


@functools.wraps(_construct_and_shard)
def _noted(*args: Any, **kwargs: Any) -> Any:
    _here.constructs_and_shards = True
    try:
        return _construct_and_shard(*args, **kwargs)
    finally:
        _here.constructs_and_shards = False


def add() -> None:
    """Let handles know when torch's runtime constructs them and shards them at once."""
    if _init_utils._init_param_handle_from_params is _construct_and_shard:  # a user's own may look in between
        _init_utils._init_param_handle_from_params = _noted


def remove() -> None:
    """Undo ``add()``."""
    if _init_utils._init_param_handle_from_params is _noted:
        _init_utils._init_param_handle_from_params = _construct_and_shard


def is_sharded_next(kind: type, own_constructor: Any) -> bool:
    """Whether the handle of this ``kind`` that this thread constructs now is sharded in the next statement.

    Each handle asks once. Whoever puts another constructor in the place of ``own_constructor`` may look in between.
    """
    answer, _here.constructs_and_shards = _here.constructs_and_shards, False
    return answer and kind is _init_utils.FlatParamHandle and getattr(kind, "__init__") is own_constructor  # noqa: B009


class Streaming(HandleBase):
    """The part of FlatParamHandle that shards without flattening."""

    _shards_next = False  # during a construction that shard() follows at once
    _unflattened: Sequence[Tensor] | None = None  # until then: the originals, in the place of the flat parameter's data

    def _may_stream(self, modules: Iterable[nn.Module]) -> bool:
        """Whether nothing looks at the unsharded data before ``shard()``."""
        return (
            self._shards_next
            and self.uses_sharded_strategy
            and not self._is_replaced(*self._steps[STREAM])
            and all(kind.__setattr__ is nn.Module.__setattr__ for kind in {type(module) for module in modules})
        )

    def _unwritten(self, numel: int, like: Tensor) -> Tensor:
        with _nothing_written():
            return torch.empty(numel, dtype=like.dtype, device=like.device)

    def _shard_of(self, originals: Sequence[Tensor]) -> tuple[Tensor, int]:
        """This rank's shard, and how many elements at its end are padding: what ``_get_shard`` gives.

        ``originals`` are the tensors of which ``flat_param`` would consist, paddings left out.
        """
        layout = self._layout
        begin, numel, padding = _C.shard_of_rank(layout.numel, self.world_size, self.rank)
        return layout.flatten(originals, _FLAT_PARAM_PADDING_VALUE, begin, begin + numel + padding), padding


@contextmanager
def _nothing_written() -> Generator[None, None, None]:
    """Keep torch.use_deterministic_algorithms from filling new memory."""
    settings: Any = torch.utils.deterministic
    before = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = before
