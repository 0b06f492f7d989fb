"""Changing modules: those that have a class by some name, and one once somebody imports it, without importing it."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Call ``change(module)`` now if the module ``name`` is imported, else as soon as it has been."""
    module = sys.modules.get(name)
    if module is not None:
        change(module)
    else:
        sys.meta_path.insert(0, _Finder(name, change))


def names_of(thing: object) -> list[tuple[ModuleType, str]]:
    """Where imported modules have ``thing``: the module, and the name there."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    return [(module, name) for module in modules for name, value in list(vars(module).items()) if value is thing]


class _Finder(MetaPathFinder):
    """Finds one module as the finders behind it do, until it has been imported: others may only ask for its spec."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]):
        self._name, self._change = name, change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        try:
            spec = find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            execute, change = spec.loader.exec_module, self._change

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
