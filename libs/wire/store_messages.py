"""Words about the durable store, between workers, coordinators and `baton cache`. As in `messages`."""

from __future__ import annotations

from libs.wire.messages import Message, Part, Source


class StoreOffer(Message, frozen=True, kw_only=True, tag="store-offer/1"):
    """Worker to coordinator: I could write these blocks to the store; which does it lack?"""

    worker_id: str
    names: tuple[bytes, ...]


class StoreWanted(Message, frozen=True, kw_only=True, tag="store-wanted/1"):
    """Reply to StoreOffer: one answer for each name. What is wanted is offered to nobody else for a while."""

    wanted: tuple[bool, ...]


class StoreLocate(Message, frozen=True, kw_only=True, tag="store-locate/1"):
    """Worker to coordinator: in which objects of the store is the longest run of these blocks?"""

    names: tuple[bytes, ...]


class StoreRun(Part, frozen=True, kw_only=True):
    """Blocks `first ... first + count - 1` of the object `key`."""

    key: str
    first: int
    count: int


class StoreLocated(Message, frozen=True, kw_only=True, tag="store-located/1"):
    """Reply to StoreLocate: runs that follow one another, from the first name on; empty where that is not there."""

    runs: tuple[StoreRun, ...]


class StoreAdded(Part, frozen=True, kw_only=True):
    """An object that was written."""

    key: str
    num_bytes: int


class StoreRemoved(Part, frozen=True, kw_only=True):
    """An object that is not to be used any more. `reason`: evicted, gone, or what is damaged."""

    key: str
    reason: str


class StoreChanged(Message, frozen=True, kw_only=True, tag="store-changed/1"):
    """Whoever changed the store to every coordinator. One that misses it learns the same from its next listing."""

    sender: str
    added: tuple[StoreAdded, ...] = ()
    removed: tuple[StoreRemoved, ...] = ()
    used: tuple[bytes, ...] = ()  # names of a prompt's first blocks, some of which were read


class Explain(Message, frozen=True, kw_only=True, tag="explain/1"):
    """`baton cache explain` to a coordinator: who holds these blocks? Nothing is placed."""

    names: tuple[bytes, ...]


class Explained(Message, frozen=True, kw_only=True, tag="explained/1"):
    """Reply to Explain: leading blocks that each worker and the store hold, and why the next one is missing."""

    workers: tuple[Source, ...]
    store_blocks: int
    miss: str
