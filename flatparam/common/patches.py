"""Change torch and the process for a time, and put back all that there was. No other file changes another library.

A ``Lifetime`` owns changes: attributes that are replaced, hooks that are registered, steps with an undo. They are made
when it begins, undone when it ends, and made again when it begins again. Each module declares its changes with
decorators, and names the test that shows the change. ``TABLE`` has them all; ``tools/patches.py`` makes docs/patches.md
of it.

A lifetime may end in a finalizer: in any thread, at any moment, inside of a changed function or of this file. So the
undo never waits; another thread in this file looks again before it leaves. A hook that a thread may be about to call
is removed by a later garbage collection.

If another library has replaced our function meanwhile, its function stays, and ours below it. Ours finds no unit, so it
calls the original alone. When the lifetime begins again, ours is used again, and no second one is added.
"""

import importlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, update_wrapper
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any, ClassVar, NamedTuple, TypeVar

from .. import _C

F = TypeVar("F", bound=Callable[..., Any])
_ABSENT: Any = object()
FOR_GOOD = "the process"


class Entry(NamedTuple):
    """A line of the table. ``why``: the first paragraph of a docstring."""

    when: str
    targets: tuple[str, ...]
    why: str
    test: str
    undo: str


TABLE: list[Entry] = []


def note(when: str, targets: Sequence[str], why: str | None, test: str, undo: str) -> None:
    """Add an entry to the table."""
    TABLE.append(Entry(when, tuple(targets), " ".join((why or "").partition("\n\n")[0].split()), test, undo))


class Lifetime:
    """A time in which changes are in force: from ``begin()`` to ``end()``, and while an object that it holds lives.

    ``when``: the time in words, for the table.
    """

    def __init__(self, when: str) -> None:
        self._when = when
        self.changes: list[_Change] = []
        self._held: dict[int, weakref.ref[Any]] = {}  # by id
        self._has_begun = False
        self.reached: bool | None = False  # whether the changes are made; None: look at each
        self._known: set[str] = set()  # the modules that were imported when the changes were made
        _lifetimes.append(self)

    @property
    def is_in_force(self) -> bool:
        return self._has_begun or bool(self._held)

    def begin(self) -> None:
        """Make the changes, until ``end()``."""
        self._has_begun = True
        _settle()

    def end(self) -> None:
        """Undo the changes, unless an object that is held lives."""
        self._has_begun = False
        _settle()

    def hold(self, owner: Any) -> None:
        """Make the changes, and keep them in force as long as ``owner`` lives."""
        held, key = self._held, id(owner)

        def gone(reference: Any) -> None:
            if held.get(key) is reference:
                del held[key]
            if not held and not sys.is_finalizing():
                _settle(wait=False)

        held[key] = weakref.ref(owner, gone)
        if not self.reached:
            _settle()

    def renew(self) -> None:
        """Replace functions again that another library has replaced, if ours must be the outermost one."""
        self.reached = None
        _settle()

    def replace(self, *targets: str, test: str, **settings: Any) -> Callable[[F], F]:
        """Declare that ``targets`` are replaced: the decorated function returns the replacement for an original.

        Modules that are not imported are changed after their import. A name that this torch lacks is left out.

        Args: ``targets``: ``"module:name"`` or ``"module:class.name"``, all of one function; ``settings``: fields of
        ``_Replacement``.
        """
        return self._declare(targets, test, lambda new: _Replacement(targets, new=new, **settings))

    def around(self, *targets: str, test: str, **settings: Any) -> Callable[[F], F]:
        """Declare that the decorated function is called in the place of ``targets``: with the original, then arguments.

        ``settings``: of ``replace``.
        """

        def declare(function: F) -> F:
            def around(original: Any) -> Any:
                return lambda *args, **kwargs: function(original, *args, **kwargs)

            around.__doc__ = function.__doc__
            self.replace(*targets, test=test, **settings)(around)
            return function

        return declare

    def add(self, target: str, test: str, owner: type | None = None) -> Callable[[F], F]:
        """Declare that ``target`` becomes the decorated function, also where it is inherited or missing."""
        settings: Any = {"owner": owner, "adds": True}
        return self._declare([target], test, lambda ours: _Replacement([target], new=lambda _: ours, **settings))

    def change(self, *targets: str, test: str) -> Callable[[F], F]:
        """Declare a generator that makes a change, yields once, and undoes it. It waits for the targets' modules."""
        return self._declare(targets, test, lambda steps: _Steps(targets, steps=steps))

    def register(
        self, register: Callable[..., Any], test: str, count: Callable[[int], Any] = lambda more: None
    ) -> Callable[[F], F]:
        """Declare that the decorated function is a global hook, which torch's function ``register`` registers.

        ``count``: is called with 1 once it is registered, and with -1 before it is removed.
        """
        targets = [f"{register.__module__}:{register.__name__}"]
        return self._declare(targets, test, lambda hook: _Hook(targets, register=register, hook=hook, count=count))

    def settle(self) -> None:
        """Make or undo the changes. Only ``_settle()`` calls this."""
        before, self.reached = self.reached, None  # first: a hold() from now on waits, or the next line sees it
        is_wanted = self.is_in_force
        if is_wanted is not before:
            for change in self.changes:
                if is_wanted and all(map(_imports.has, change.modules)) and (not change.is_made or change.outermost):
                    change.make()
                    change.is_made = True
                elif not is_wanted and change.is_made:
                    change.is_made = not change.take_back()
            if is_wanted:
                self._known = self._known or set(sys.modules)
            else:
                # Not known: this is a later try, and only what could not be undone before is left
                since = [*sys.modules.keys() - self._known] if self._known else []
                _rebind([pair for change in self.changes for pair in change.pairs], since)
                self._known = set()
                if any(change.is_made for change in self.changes):
                    _TryAgain()
        self.reached = is_wanted

    def _declare(self, targets: Sequence[str], test: str, new: Callable[[Any], "_Change"]) -> Callable[[F], F]:
        def declare(function: F) -> F:
            self.changes.append(new(function))
            note(self._when, targets, function.__doc__, test, self.changes[-1].undo)
            return function

        return declare


def replaced() -> list[str]:
    """Return the targets of all replacements, ``"module:name"``, without names that are added."""
    changes = [change for lifetime in _lifetimes for change in lifetime.changes if isinstance(change, _Replacement)]
    return [target for change in changes if not change.adds for target in change.targets]


def names_of(thing: object, under: str = "") -> list[tuple[ModuleType, str]]:
    """Return ``(module, name)`` for each global name that refers to ``thing``, of imported modules ``under...``."""
    return [place for place in _C.names_of(sys.modules, thing) if place[0].__name__.startswith(under)]


@dataclass(eq=False)
class _Change:
    """A change that can be made and undone any number of times."""

    targets: Sequence[str]
    is_made: bool = field(default=False, init=False)
    outermost: bool = False
    pairs: list[tuple[Any, Any]] = field(default_factory=list, init=False)  # (original, ours), all that were made
    undo: ClassVar[str] = ""  # in words

    @cached_property
    def modules(self) -> set[str]:
        """The modules that must be imported before."""
        return {target.partition(":")[0] for target in self.targets}

    def make(self) -> None:
        raise NotImplementedError

    def take_back(self) -> bool:
        """Undo the change. False: that is impossible now."""
        raise NotImplementedError


Place = tuple[Any, str]  # an object, and the name of its attribute


@dataclass(eq=False, kw_only=True)
class _Replacement(_Change):
    """Attributes that are replaced.

    ``new(original)``: what replaces it; ``owner``: the class, if ``install(runtime=True)`` lets its name mean ours;
    ``everywhere``: replace each name under which a module has imported the function; ``outermost``: ``renew()`` puts a
    further replacement around another library's; ``adds``: the name may be missing, or inherited; ``is_needed()``:
    whether they stay replaced after the lifetime, until a later garbage collection asks again.
    """

    new: Callable[[Any], Any]
    owner: type | None = None
    everywhere: bool = False
    adds: bool = False
    is_needed: Callable[[], bool] = bool  # bool() is False
    # (id of the owner, name) -> where ours is, perhaps below another library's; the value that it has replaced
    _put: dict[tuple[int, str], tuple[Place, Any]] = field(default_factory=dict, init=False)
    undo = "The original is put back, unless another library has replaced ours."

    def make(self) -> None:
        for place in self._places():
            key, now = (id(place[0]), place[1]), _read(place)
            if self._pair_of(now) is not None:  # ours is there already, or somebody has put it back
                self._put[key] = place, now
            elif self.outermost or key not in self._put or now is self._put[key][1]:
                ours = self._ours_for(now, place)
                if ours is not now:
                    self._put[key] = place, now
                    _write(place, ours)

    def take_back(self) -> bool:
        if self.is_needed():
            return False
        for key, (place, _) in list(self._put.items()):
            while (pair := self._pair_of(_read(place))) is not None:
                _write(place, pair[0])
                self._put.pop(key, None)
        return True

    def _pair_of(self, value: Any) -> tuple[Any, Any] | None:
        return next((pair for pair in self.pairs if pair[1] is value), None)

    def _places(self) -> list[Place]:
        """Return where the function is now, without the places that this torch lacks."""
        places: list[Place] = []
        for target in self.targets:
            module, _, path = target.partition(":")
            *classes, name = path.split(".")
            owner: Any = sys.modules[module]
            for part in classes:
                owner = getattr(owner, part, None)
            owner = self.owner or owner
            if owner is not None and (self.adds or hasattr(owner, name)):
                places.append((owner, name))
        if not self.everywhere or not places:
            return places
        function: Any = getattr(*places[0])
        inner = getattr(function, "__wrapped__", _ABSENT)  # the same one under all names, if the function is decorated
        cells: list[Place] = [(cell, "cell_contents") for cell in getattr(function, "__closure__", None) or ()]
        found = [cell for cell in cells if _read(cell) is inner or self._pair_of(_read(cell)) is not None]
        return found or [*names_of(function)]

    def _ours_for(self, now: Any, place: Place) -> Any:
        for original, ours in self.pairs:
            if original is now:
                return ours
        kind = type(now) if isinstance(now, staticmethod | classmethod) else None
        function = now.__func__ if kind is not None else getattr(*place, None) if now is _ABSENT else now
        ours = self.new(function)
        if isinstance(ours, FunctionType) and not self.adds:
            update_wrapper(ours, function or ours)
        ours = ours if kind is None else kind(ours)
        self.pairs.append((now, ours))
        return ours


def _read(place: Place) -> Any:
    """Return the attribute as the object itself has it, or the content of a cell."""
    owner, name = place
    return vars(owner).get(name, _ABSENT) if hasattr(owner, "__dict__") else getattr(owner, name, _ABSENT)


def _write(place: Place, value: Any) -> None:
    if value is _ABSENT:
        delattr(*place)
    else:
        setattr(*place, value)


def _rebind(pairs: Sequence[tuple[Any, Any]], modules: Sequence[str]) -> None:
    """Let names that ``modules`` have imported refer to the originals."""
    originals = {id(ours): original for original, ours in pairs if original is not _ABSENT}
    for module in filter(lambda module: isinstance(module, ModuleType), map(sys.modules.get, modules)):
        for name, value in list(vars(module).items()):
            if id(value) in originals:
                setattr(module, name, originals[id(value)])


@dataclass(eq=False, kw_only=True)
class _Hook(_Change):
    """A global hook of torch."""

    register: Callable[..., Any]
    hook: Callable[..., Any]
    count: Callable[[int], Any]
    _handle: Any = None
    undo = "The hook is removed."

    def make(self) -> None:
        self._handle = self.register(self.hook)
        self.count(1)

    def take_back(self) -> bool:
        hooks = self._handle.hooks_dict_ref()
        (module,) = self.modules
        ((_, name),) = _C.names_of({module: sys.modules[module]}, hooks)
        self.count(-1)
        is_removed = _C.remove_unless_read(hooks, self._handle.id, name)
        if not is_removed:
            self.count(1)
        return is_removed


@dataclass(eq=False, kw_only=True)
class _Steps(_Change):
    """A change that a generator makes and undoes."""

    steps: Callable[[], Iterator[None]]
    _under_way: Any = None
    undo = "It is undone in steps."

    def make(self) -> None:
        self._under_way = self.steps()
        next(self._under_way)

    def take_back(self) -> bool:
        next(self._under_way, None)
        return True


_lifetimes: list[Lifetime] = []
_lock = threading.RLock()
_is_busy = False  # whether the thread that has the lock is in the loop of _settle()


def _settle(wait: bool = True) -> None:
    """Make and undo the changes that are due.

    ``wait``: for another thread that does this; without a wait that thread looks again at its end.
    """
    global _is_busy
    while any(lifetime.reached is not lifetime.is_in_force for lifetime in _lifetimes):
        if not _lock.acquire(blocking=wait):
            return
        try:
            if _is_busy:  # this is a finalizer, or a signal's handler, inside of the loop
                return
            _is_busy = True
            try:
                for lifetime in _lifetimes:
                    lifetime.settle()
            finally:
                _wait_for_imports()
                _is_busy = False
        finally:
            _lock.release()


def _look_again() -> None:
    for lifetime in _lifetimes:
        lifetime.reached = None
    _settle(wait=False)


class _TryAgain:
    """Garbage: when it is collected, the changes that could not be undone before are undone."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        if _is_busy:
            _TryAgain()
        else:
            _look_again()


class _Imports(MetaPathFinder):
    """The finder of modules that must be changed after their import, while there are any. It asks the next finders."""

    def __init__(self) -> None:
        self.wanted: set[str] = set()
        self.found: set[str] = set()  # those that were not executed yet

    def has(self, module: str) -> bool:
        """Whether ``module`` is imported."""
        return module in sys.modules and module not in self.found

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.wanted:
            return None
        finders = [one for one in sys.meta_path if one is not self and hasattr(one, "find_spec")]  # as Python does
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self.found.add(fullname)
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self.found.discard(fullname)
                _look_again()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_imports = _Imports()
_READER: Any = getattr(importlib, "_bootstrap")._find_spec.__code__  # noqa: B009  (the loop over the finders)


def _wait_for_imports() -> None:
    changes = (change for lifetime in _lifetimes if lifetime.is_in_force for change in lifetime.changes)
    _imports.wanted = {module for change in changes for module in change.modules if not _imports.has(module)}
    if _imports.wanted and _imports not in sys.meta_path:
        sys.meta_path.insert(0, _imports)
        return
    is_left = not _imports.wanted and _imports in sys.meta_path
    if is_left and not _C.remove_unless_read(sys.meta_path, _imports, _READER):
        _TryAgain()


def _after_fork() -> None:
    """Forget the thread that was changing torch: the child does not have it."""
    global _lock, _is_busy
    _lock, _is_busy = threading.RLock(), False
    _look_again()


os.register_at_fork(after_in_child=_after_fork)
note(FOR_GOOD, ["os:register_at_fork"], _after_fork.__doc__, "tests/packaging/test_patches.py", "Python has none.")

flat_params_live = Lifetime("from the first wrapped model or handle to the last")
