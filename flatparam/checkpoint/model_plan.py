"""Load parameters and buffers from a ``Source`` into a model: plan all reads and check them, then commit.

``checkpoint.load`` and ``load_safetensors`` share this. They differ in how ranks agree between the two steps, and in
when they read. No collective calls.
"""

from collections import ChainMap
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..common.tensors import rounds
from ..fsdp.names import bare_names
from ..fsdp.states.loading import note_filled
from ..fsdp.states.values import same
from ..fsdp.unit.local_params import LocalParam
from .base import Base, check_names
from .boxes import Read, check_whole, reads_of
from .errors import CheckpointError
from .files import Chunk
from .modules import Taken, as_they_are, check_kind, take
from .pieces import InHandle
from .reading import Source


class ModelPlan:
    """The plan of a load into ``module``, empty until ``plan`` is called.

    ``names``: parameter or buffer that is written -> its names in the files, whose values must be equal. ``base``:
    parameter -> its name in the base: the checkpoint has no values. ``taken``: the outcome of the modules' own load.
    ``alike``: names that modules wrote and none loads, and that the model has as the files do.
    ``rounded``: (name, dtype in the file, dtype here).
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self.taken: Taken | None = None
        self.reads: list[Read] = []
        self.names: dict[LocalParam, list[str]] = {}
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.base: dict[LocalParam, str] = {}
        self.alike: set[str] = set()
        self.rounded: list[tuple[str, torch.dtype, torch.dtype]] = []

    def into(self, one: LocalParam) -> Tensor:
        """Return where the elements of ``one`` are read to."""
        return one.flat

    def plan(self, held: list[LocalParam], source: Source, strict: bool = False) -> None:
        """Let the modules load by their own code, and plan the reads of all other values into ``held``.

        ``strict``: a base must fit in every name and dtype.
        Raises: CheckpointError naming tensors whose shape or kind of dtype does not fit; as ``take``. The caller then
        calls ``undo``.
        """
        self.taken = taken = take(self.module, held, source)
        base: Base | None = source.about.get("base")
        chunks_of, known = ChainMap(dict(source.alone), dict(source.model)), set[str]()
        for one in held:
            names = one.names if taken is None else taken.names.get(one, [])
            known.update(names)
            here = [name for name in names if name in source.model]
            of_base = next((name for name in names if name in base), None) if not here and base else None
            if of_base is not None:
                self.base[one] = of_base
            elif here:
                target = self.into(one) if one.numel else None
                self._plan_reads(one, here[:1] if here[0] in source.alone else here, chunks_of, target)
            else:
                self.missing.append(one.name)
        self.unexpected = [name for name in source.model if name not in known]
        if taken is not None:
            self.missing, self.unexpected = taken.missing, taken.unexpected
            self.names |= {one: [] for one in taken.values}
        given = [name for name in source.about.get("given", ()) if name in self.unexpected]
        left = {name: source.whole(name, chunks_of[name]) for name in given}
        self.alike = as_they_are(self.module, held, {**left, **(source.values if taken is None else {})}, strict)
        self.unexpected = [name for name in self.unexpected if name not in self.alike]
        if base:
            check_names(base, self.base, known, strict)

    def _plan_reads(
        self, one: LocalParam, names: list[str], chunks_of: Mapping[str, list[Chunk]], into: Tensor | None
    ) -> None:
        dtype = (one.owner if into is None else into).dtype
        for name in names:
            check_fits(name, chunks_of[name], one.shape, dtype)
        self.names[one] = names
        chunks = chunks_of[names[0]]
        if into is not None:
            self.reads += reads_of(names[0], chunks, one.dense, one.start, into)
        stored = chunks[0].torch_dtype(names[0])
        if rounds(stored, dtype):
            self.rounded.append((names[0], stored, dtype))

    def check_tied(self, source: Source) -> None:
        """Raises: CheckpointError, if two names of one parameter have different values in the files."""
        for held, names in self.names.items():
            for other in names[1:]:
                if not same(_values(held, names[0], source), _values(held, other, source)):
                    raise CheckpointError(
                        f"`{names[0]}` and `{other}` are one parameter, and have different values in the files"
                    )

    def commit(self) -> None:
        """Write the values that modules have computed, and tell units and handles of all written parameters."""
        taken, self.taken = self.taken, None  # from here on nothing is undone
        for held, whole in taken.values.items() if taken is not None else ():
            held.flat.copy_(held.slice_of(whole))
        for held in self.names:
            torch.autograd.graph.increment_version(held.owner)
            if isinstance(held, InHandle):
                held.handle._forget_what_was_gathered()
        note_filled(self.module, {name for one in self.names for name in one.names}, bare_names(self.module))

    def undo(self) -> None:
        """Restore the values that the load of the modules has changed, unless ``commit`` has begun."""
        if self.taken is not None:
            self.taken.before.restore()


def check_fits(name: str, chunks: list[Chunk], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises: CheckpointError unless ``chunks`` are whole, of ``shape``, and may be loaded into ``dtype``."""
    check_whole(name, chunks)
    if chunks[0].shape != shape:
        raise CheckpointError(f"{chunks[0].file}: `{name}` has shape {chunks[0].shape}, the model's has {shape}")
    check_kind(name, chunks[0], dtype)


def _values(held: LocalParam, name: str, source: Source) -> Tensor:
    """Return this rank's elements of ``name``, in the dtype of ``held``. Raises: as ``Source.check``."""
    out = torch.empty(held.numel, dtype=held.flat.dtype, device="cpu")
    source.fill(name, source.model[name], held.dense, held.start, out)
    return out
