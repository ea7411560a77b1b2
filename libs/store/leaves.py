"""Leaves first: an object that another one continues is not deleted before that one."""

from __future__ import annotations

from libs.store.blocks import each_key
from libs.store.order import Entry, EvictionPolicy, Looks


class Leaves:
    """Which objects others build on, counted by the block that they continue.

    So neither the order in which objects become known matters, nor which of several holds that block.
    """

    def __init__(self) -> None:
        self._children: dict[bytes, int] = {}  # objects by their parent's key
        self._set_aside: dict[
            bytes, list[tuple[Entry, EvictionPolicy]]
        ] = {}  # by the child that they wait for

    def added(self, entry: Entry) -> None:
        self._children[entry.parent] = self._children.get(entry.parent, 0) + 1

    def removed(self, entry: Entry) -> None:
        """What waited for this object goes back to the order that it was popped from."""
        left = self._children[entry.parent] - 1
        if left:
            self._children[entry.parent] = left
            return
        del self._children[entry.parent]
        for waiting, order in self._set_aside.pop(entry.parent, ()):
            if not waiting.gone and not self._wait(waiting, order):
                order.put_back(waiting)

    def pop(self, order: EvictionPolicy, tenant: str, looks: Looks) -> Entry | None:
        """The next of a tenant's leaves. Objects that come before it and are none wait for their children to go."""
        while (entry := order.pop(tenant, looks)) is not None:
            if not self._wait(entry, order):
                return entry
        return None

    def _wait(self, entry: Entry, order: EvictionPolicy) -> bool:
        """Sets an object aside if another one continues one of its blocks."""
        keys = reversed([*each_key(entry.keys)])  # most go on behind the last block
        child = next((key for key in keys if key in self._children), None)
        if child is None:
            return False
        self._set_aside.setdefault(child, []).append((entry, order))
        return True
