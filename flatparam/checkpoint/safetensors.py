"""``load_safetensors``: load safetensors files into a wrapped model. Each rank reads the elements of its own shards.

Plan and check on each rank (`model_plan.py`), agree over the units' groups by a collective, then commit. A model
without values is read into directly, and blanked again if the load fails.
"""

import os
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from ..common.torch_private import _IncompatibleKeys
from ..fsdp.names import bare_names
from ..fsdp.sharding.deferred import blank
from ..fsdp.sharding.unit_description import digest_of
from ..fsdp.states.loading import Values, agree_on_loading
from ..fsdp.states.safetensors_files import Files, sample_of
from ..fsdp.unit.local_params import LocalParam, local_params_of, refuse_forms
from ..fsdp.unit.unit import units_of
from .errors import check_model, names_that_differ, naming_checkpoint
from .foreign import Foreign, whole_tensors
from .model_plan import ModelPlan
from .planning import check_idle

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def load_safetensors(module: nn.Module, files: Paths, *, strict: bool = True) -> _IncompatibleKeys:
    """Load parameters and buffers from safetensors files straight into the shards of the units in ``module``.

    A collective call. Each rank reads the bytes of its own slices, and converts them a MiB at a time; parameters that
    no unit manages, and buffers, are read whole. All ranks load, or none: files are checked and read before the model
    changes. For that a model with values needs a second copy of its shards in host memory; a model that ``defer_init``
    made needs none. Hooks and overrides for loading run as in ``module.load_state_dict()``, without gathers.

    Args: ``files``: a file, an index of several (``*.index.json``), a folder with one of them under its usual name, or
    several files. Names are those of the model without wrappers, ``torch.compile`` and DDP; a tied parameter needs one
    of its names. A floating dtype is converted to another floating one; other kinds are not converted. ``strict``: the
    files must have every name of the model, and no other.
    Returns: ``missing_keys`` and ``unexpected_keys``.
    Raises: RuntimeError on every rank, naming the rank and its error: missing or unexpected names; another shape or
    kind of dtype; a file that is not in the format or cannot be read; different files on other ranks; a model in the
    middle of a step; a hook that computes with a parameter. The model is then as before. TypeError for no module.
    """
    check_model(module, "load_safetensors")
    units = list(units_of(module.modules()))
    loading = _Loading(module)
    error: Exception | None = None
    try:
        try:
            check_idle(module, "load_safetensors")
            loading.read(files, strict)
        except Exception as caught:
            error = caught
        agree_on_loading("load_safetensors", units, error, loading.values)
    except BaseException as failure:
        loading.undo()
        raise failure from error
    finally:
        error = None  # its traceback holds this frame, and with it the model
        loading.close()
    loading.commit()
    return _IncompatibleKeys(loading.missing, loading.unexpected)


class _Loading(ModelPlan):
    """One load on this rank. ``values``: digests that must be equal on all ranks. Owns the open files."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.values: Values = {}
        self._read: dict[LocalParam, Tensor] = {}  # target -> the elements read: in place, or in a copy
        self._reader: Files | None = None

    def read(self, files: Paths, strict: bool) -> None:
        """Check all names and read this rank's elements. Raises: an exception; the caller then calls ``undo``."""
        held = list(local_params_of(self.module, name_of=bare_names(self.module)))
        refuse_forms(held, "load_safetensors", "load it before it is parallelized, or by a state dict")
        reader = self._reader = Files(files)
        source = Foreign()
        source.model = whole_tensors(reader)  # under their own names
        with naming_checkpoint(Path(files)) if isinstance(files, str | os.PathLike) else nullcontext():
            self.plan(held, source)
        if strict and (self.missing or self.unexpected):
            kinds = ("Missing key(s) in the files", "Unexpected key(s) in the files")
            raise RuntimeError(names_that_differ(self.missing, self.unexpected, kinds, '"'))
        for read in self.reads:
            source.read(read)
        self.check_tied(source)
        self.values["the header"] = (None, reader.digest)
        for one, names in self.names.items():
            if one.unit is not None:
                self.values |= {name: (one.unit, sample_of(reader.entries[name])) for name in names}
        for one, whole in self.taken.values.items() if self.taken is not None else ():
            if one.unit is not None:
                self.values[one.name] = (one.unit, f"{whole.dtype} {digest_of(whole)}")

    def into(self, one: LocalParam) -> Tensor:
        """Read in place, if ``one`` has no values that a failure could lose; else into a copy on the host."""
        self._read[one] = torch.empty_like(one.flat, device="cpu") if one.has_values else one.flat
        return self._read[one]

    @torch.no_grad()
    def commit(self) -> None:
        """Copy the elements read into the module, and tell the units."""
        for one, value in self._read.items():
            if value is not one.flat:
                one.flat.copy_(value)
        super().commit()

    def undo(self) -> None:
        """Restore the module."""
        for one, value in self._read.items():
            if value is one.flat:
                blank(value)
        super().undo()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
