"""Change functions of torch for a time, and put them back: no other file sets an attribute of another library.

A ``Lifetime`` owns changes. They are made when it begins, and undone when it ends. Where another library has replaced
our function in between, its function stays, and ours under it calls the original alone.
"""

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

_ABSENT = object()
_lock = threading.RLock()


class Lifetime:
    """A time in which changes are in force: from ``begin()`` to ``end()``, and while an object that it holds lives."""

    def __init__(self) -> None:
        self._changes: list[_Replacement] = []
        self._held: dict[int, weakref.ref[Any]] = {}
        self._has_begun = self._is_settling = False

    def replace(self, module: str, name: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
        """Declare that ``name`` of ``module`` becomes the result of the decorated function, called with the original.

        A torch release without the name is left as it is.
        """

        def declare(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
            self._changes.append(_Replacement(module, name, make))
            return make

        return declare

    def begin(self) -> None:
        """Make the changes."""
        self._has_begun = True
        self._settle()

    def end(self) -> None:
        """Undo the changes, unless an object that is held lives."""
        self._has_begun = False
        self._settle()

    def hold(self, owner: Any) -> None:
        """Keep the changes in force as long as ``owner`` lives."""
        held = self._held

        def gone(reference: Any, key: int = id(owner)) -> None:
            if held.get(key) is reference:
                del held[key]
            if not sys.is_finalizing():
                self._settle(wait=False)

        held[id(owner)] = weakref.ref(owner, gone)
        self._settle()

    def _settle(self, wait: bool = True) -> None:
        """Make or undo the changes. A finalizer does not wait: the thread that is at it looks again afterwards."""
        while any(change.is_made != self.is_in_force for change in self._changes):
            if not _lock.acquire(blocking=wait):
                return
            try:
                if self._is_settling:  # a garbage collection has called this inside of this loop
                    return
                self._is_settling = True
                try:
                    for change in self._changes:
                        change.settle(self.is_in_force)
                finally:
                    self._is_settling = False
            finally:
                _lock.release()

    @property
    def is_in_force(self) -> bool:
        return self._has_begun or bool(self._held)


class _Replacement:
    """One attribute of a module, and what it is replaced by."""

    def __init__(self, module: str, name: str, make: Callable[[Any], Any]) -> None:
        self._module, self._name, self._make = module, name, make
        self._before = self._ours = _ABSENT
        self.is_made = False

    def settle(self, is_wanted: bool) -> None:
        owner = sys.modules.get(self._module)
        now = getattr(owner, self._name, _ABSENT)
        if is_wanted and now is not self._ours and now is not _ABSENT:
            self._before, self._ours = now, self._make(now)
            setattr(owner, self._name, self._ours)
        elif not is_wanted and now is self._ours and now is not _ABSENT:
            setattr(owner, self._name, self._before)
        self.is_made = is_wanted
