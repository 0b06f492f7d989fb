"""The stores of process groups: every call of one is made here, so that a store that is gone is told in one way."""

from __future__ import annotations

import contextlib
import datetime
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from ..errors import StoreGoneError, without_store

WITHOUT_STORE = ("fake", "threaded")  # backends of groups whose ranks are not processes
_NOTHING = "-"
_ERRORS = (dist.DistStoreError, dist.DistNetworkError)


@contextlib.contextmanager
def reaching() -> Iterator[None]:
    """For a block, or a function, that calls a store. Raises: StoreGoneError, where the store cannot be reached."""
    try:
        yield
    except _ERRORS as error:
        raise StoreGoneError(without_store(error)) from error


class Store:
    """One of torch's, of which no call waits for another rank. Each may raise StoreGoneError."""

    def __init__(self, raw: dist.Store):
        self.raw = raw  # for torch, which makes groups with it

    def below(self, prefix: str) -> Store:
        """The same one, where all keys have ``prefix``."""
        return Store(dist.PrefixStore(prefix, self.raw))

    def own_connection(self) -> Store:
        """One that does not wait until another thread's ``store.wait()`` or ``get()`` has ended."""
        self.check([_NOTHING])  # a new connection would try for minutes to reach a store that is gone
        try:
            with reaching():
                return Store(self.raw.clone())  # type: ignore[attr-defined]
        except StoreGoneError:
            raise
        except RuntimeError:  # a kind that has none
            return self

    @property
    def time_out(self) -> datetime.timedelta:
        """After which torch's own waits end."""
        found: datetime.timedelta = getattr(self.raw, "timeout", dist.constants.default_pg_timeout)
        return found

    @reaching()
    def set(self, key: str, value: str) -> None:
        self.raw.set(key, value)

    @reaching()
    def add(self, key: str, number: int) -> int:
        """What is at ``key`` then."""
        return self.raw.add(key, number)

    @reaching()
    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        return self.raw.check(keys)

    @reaching()
    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """What is at ``key`` then: ``desired``, where ``expected`` was (empty: nothing), else what was there."""
        return self.raw.compare_set(key, expected, desired).decode()

    def value_at(self, key: str) -> str:
        """What is there; empty: nothing. In one call, as another rank may delete it between two."""
        said = self.compare_set(key, _NOTHING, _NOTHING)  # which changes nothing, and waits for nobody
        return "" if said == _NOTHING else said

    @reaching()
    def values_at(self, keys: Sequence[str]) -> list[str]:
        """Of keys that are there."""
        return [value.decode() for value in self.raw.multi_get(list(keys))]

    @reaching()
    def delete(self, key: str) -> None:
        self.raw.delete_key(key)


_connections: weakref.WeakKeyDictionary[dist.ProcessGroup, Store] = weakref.WeakKeyDictionary()


def store_of(group: dist.ProcessGroup) -> Store | None:
    """That of a group whose ranks are processes."""
    _, raw = dist.distributed_c10d._world.pg_map.get(group, (None, None))
    return None if raw is None or dist.get_backend(group) in WITHOUT_STORE else Store(raw)


def store_of_world() -> Store:
    """That with which the world was made."""
    return Store(dist.distributed_c10d._get_default_store())


def connection_of_world() -> Store:
    """The same over a connection of ours, made once: later the store may be gone while it is made."""
    world: Any = dist.group.WORLD
    if world not in _connections:
        _connections[world] = store_of_world().own_connection()
    return _connections[world]
