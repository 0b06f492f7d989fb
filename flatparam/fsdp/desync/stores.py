"""The stores of process groups. Every call of a store in Python is made here.

A lost store is thus always a StoreGoneError, and no call waits for another rank, so Ctrl-C is noticed. The rest of
``desync`` and ``flatparam/checkpoint/rendezvous.py`` use it. It does not know the meaning of keys.
"""

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
    """Turn torch's store errors in a block or a function into StoreGoneError."""
    try:
        yield
    except _ERRORS as error:
        raise StoreGoneError(without_store(error)) from error


class Store:
    """A store of torch, with the calls that do not wait for another rank. Each may raise StoreGoneError."""

    def __init__(self, raw: dist.Store):
        self.raw = raw  # torch's own, to make groups with

    def below(self, prefix: str) -> Store:
        """Return the same store with ``prefix`` before all keys."""
        return Store(dist.PrefixStore(prefix, self.raw))

    def own_connection(self) -> Store:
        """Return the store over another connection; this one where its kind has no clone.

        A connection is locked during another thread's ``wait()`` or ``get()``; the new one is not.
        """
        self.check([_NOTHING])  # fails at once if the store is gone; a new connection tries for minutes
        try:
            with reaching():
                return Store(self.raw.clone())  # type: ignore[attr-defined]
        except StoreGoneError:
            raise
        except RuntimeError:  # this kind of store has no clone
            return self

    @property
    def time_out(self) -> datetime.timedelta:
        """The time after which torch's own waits end."""
        found: datetime.timedelta = getattr(self.raw, "timeout", dist.constants.default_pg_timeout)
        return found

    @reaching()
    def set(self, key: str, value: str) -> None:
        self.raw.set(key, value)

    @reaching()
    def add(self, key: str, number: int) -> int:
        """Add ``number`` to the number at ``key``, and return the sum."""
        return self.raw.add(key, number)

    @reaching()
    def check(self, keys: list[str]) -> bool:
        """Whether all ``keys`` exist."""
        return self.raw.check(keys)

    @reaching()
    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Set ``key`` to ``desired`` if its value is ``expected`` (empty: no such key). Returns the value then."""
        return self.raw.compare_set(key, expected, desired).decode()

    def value_at(self, key: str) -> str:
        """Return the value at ``key``; empty: no such key. In one call: another rank may delete the key between two."""
        said = self.compare_set(key, _NOTHING, _NOTHING)  # unlike get(), this does not wait for a missing key
        return "" if said == _NOTHING else said

    @reaching()
    def values_at(self, keys: Sequence[str]) -> list[str]:
        """Return the values of ``keys``, all of which exist."""
        return [value.decode() for value in self.raw.multi_get(list(keys))]

    @reaching()
    def delete(self, key: str) -> None:
        self.raw.delete_key(key)


def connect(host: str, port: int, serves: bool = False, seconds: float = 60.0) -> Store:
    """Return the TCP store at ``host:port``. ``serves``: this process runs it. Raises: StoreGoneError."""
    with reaching():
        return Store(dist.TCPStore(host, port, None, serves, datetime.timedelta(seconds=seconds), False))


def in_memory() -> Store:
    """Return a new store for a world of this process alone."""
    return Store(dist.HashStore())


def all_groups() -> list[dist.ProcessGroup]:
    """Return the process groups of this rank."""
    return list(dist.distributed_c10d._world.pg_map)


def forget_names() -> None:
    """Reset torch's count of groups, from which it makes their names, in a rank without a world.

    torch counts a world that it could not make, too, so the next names would differ between ranks.
    """
    dist.distributed_c10d._world.group_count = 0


_connections: weakref.WeakKeyDictionary[dist.ProcessGroup, Store] = weakref.WeakKeyDictionary()


def store_of(group: dist.ProcessGroup) -> Store | None:
    """Return the store of ``group``; None: it has none, or its ranks are not processes."""
    _, raw = dist.distributed_c10d._world.pg_map.get(group, (None, None))
    return None if raw is None or dist.get_backend(group) in WITHOUT_STORE else Store(raw)


def store_of_world() -> Store:
    """Return the store with which the world was made."""
    return Store(dist.distributed_c10d._get_default_store())


def connection_of_world() -> Store:
    """Return the world's store over another connection. It is made once: later the store may be gone."""
    world: Any = dist.group.WORLD
    if world not in _connections:
        _connections[world] = store_of_world().own_connection()
    return _connections[world]
