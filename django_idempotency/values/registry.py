"""Where apps add to what the core shows, counts or runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Items in the order in which they were registered, each of them once: an
    ``AppConfig`` can get ready again.
    """

    def __init__(self, *items: T) -> None:
        self._items = [*items]
        self._listeners: list[Callable[[T], object]] = []

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def register(self, *items: T) -> None:
        """Add ``items``. Call this in the ``ready()`` of an app."""
        for item in items:
            if item not in self._items:
                self._items.append(item)
                for listener in self._listeners:
                    listener(item)

    def for_each(self, listener: Callable[[T], object]) -> None:
        """Call ``listener`` with each item that is registered, and with each that will
        be.
        """
        self._listeners.append(listener)
        for item in self._items:
            listener(item)
