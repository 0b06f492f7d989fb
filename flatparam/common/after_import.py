"""Change Python modules of other libraries: modules that are imported, and modules that may be imported later.

The installer of the drop-in and the patches of ``fsdp/interop`` call this. It imports no module itself.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Call ``change(module)`` now if the module ``name`` is imported, else right after its import."""
    module = sys.modules.get(name)
    if module is not None:
        change(module)
    else:
        sys.meta_path.insert(0, _Finder(name, change))


def names_of(thing: object) -> list[tuple[ModuleType, str]]:
    """Return ``(module, name)`` for each global name of an imported module that refers to ``thing``."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    return [(module, name) for module in modules for name, value in list(vars(module).items()) if value is thing]


class _Finder(MetaPathFinder):
    """A finder of one module, which asks the finders behind it and adds ``change`` to the module's execution.

    It stays in ``sys.meta_path`` until the module was executed: a caller of ``find_spec`` may not import the module.
    """

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
