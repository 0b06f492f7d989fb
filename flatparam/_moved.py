"""Import paths of flatparam 0.1.0, which scripts and pickles name: each is the module that took its place."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "flatparam._after_import": "flatparam.common.after_import",
    "flatparam._base": "flatparam.dropin.base",
    "flatparam._collectives": "flatparam.common.collectives",
    "flatparam._compat": "flatparam.dropin.install",
    "flatparam._compiling": "flatparam.common.torch_private",
    "flatparam._exports": "flatparam.common.tensors",
    "flatparam._flat_param": "flatparam.dropin.flat_param",
    "flatparam._flatten": "flatparam.dropin.flatten",
    "flatparam._fused": "flatparam.dropin.gathering",
    "flatparam._gathered_states": "flatparam.dropin.install",
    "flatparam._gradients": "flatparam.dropin.gradients",
    "flatparam._install": "flatparam.dropin.install",
    "flatparam._interruption": "flatparam.dropin.recovery",
    "flatparam._optimizer_steps": "flatparam.common.optimizers",
    "flatparam._pickling": "flatparam.common.pickling",
    "flatparam._spawned": "flatparam.commands.spawned",
    "flatparam._storage": "flatparam.common.tensors",
    "flatparam._streaming": "flatparam.dropin.flatten",
    "flatparam._views": "flatparam.dropin.views",
    "flatparam._waits": "flatparam.common.collectives",
    "flatparam._writeback": "flatparam.dropin.writeback",
    "flatparam._zeroing": "flatparam.dropin.writeback",
    "flatparam.fsdp.pickling": "flatparam.fsdp.wrapper.copying",
    "flatparam.fsdp.plan": "flatparam.fsdp.unit.memory_plan",
    "flatparam.copying": "flatparam.dropin.copying",
    "flatparam.handle": "flatparam.dropin.handle",
    "flatparam.layout": "flatparam.common.layout",
    "flatparam.run": "flatparam.commands.run",
}


class MovedModules(MetaPathFinder, Loader):
    """Gives the module of the new path for the old one: the same object, so that its classes and state are one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(MOVED[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run already; the import system has just given it the specification of the old path."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def add() -> None:
    """Let the old paths be imported, after everything else was asked for them."""
    sys.meta_path.append(MovedModules())
