"""Which of the handle's methods a user may replace, and what then takes the longer way.

A fast path does the work of several methods without calling them. Such a method names the fast paths that pass it by;
the handle takes a fast path only while none of those methods was replaced, on the class or on the handle.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])

FLATTEN = "flatten"  # parameters into a flat one, in C
RESHARD = "reshard"  # in one call
STREAM = "stream"  # the shard filled straight from the originals, with no flat parameter before it
UNSHARD = "unshard"  # in one call
VIEWS = "views"  # made and shown by C's loops


def step_of(*paths: str) -> Callable[[Method], Method]:
    """Mark a method that these fast paths pass by."""

    def mark(method: Method) -> Method:
        method.__dict__["passed_by"] = paths
        return method

    return mark


def steps_by_path(methods: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the names of the marked ``methods``, by the fast path that passes them by."""
    steps: dict[str, tuple[str, ...]] = {}
    for name, method in methods.items():
        for path in getattr(method, "passed_by", ()):
            steps[path] = (*steps.get(path, ()), name)
    return steps
