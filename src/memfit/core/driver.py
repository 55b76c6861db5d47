"""What lies below the allocator: the CUDA driver, which hands out memory until there is none, and at which addresses.

Assumed: any request that fits in the bytes left is served. The driver maps pages of 2 MiB freely, so its own
fragmentation does not count.
"""

from __future__ import annotations

from collections.abc import Callable

from memfit.core.alloc_stats import AllocatorStats
from memfit.core.events import Action
from memfit.units import MiB

AddressSource = Callable[[int, bool], int]
"""`next_address(size, small)`: where a new segment (or expandable reservation) of the small or large pool lies."""

FIRST_ADDRESS = 0x7000_0000_0000
GAP = 2 * MiB  # segments never touch, so nothing can come to depend on their being neighbours


def rising_addresses(start: int = FIRST_ADDRESS) -> AddressSource:
    """Every segment above the one before; an address is not used again after a release."""

    def next_address(size: int, small: bool) -> int:
        nonlocal start
        address = start
        start += -(-size // GAP) * GAP + GAP
        return address

    return next_address


def falling_addresses(start: int = FIRST_ADDRESS) -> AddressSource:
    """Every segment below the one before, as recordings mostly show. Only the order of addresses matters."""

    def next_address(size: int, small: bool) -> int:
        nonlocal start
        start -= -(-size // GAP) * GAP + GAP
        return start

    return next_address


class Driver:
    """Counts what it hands out and refuses what would pass `capacity`."""

    def __init__(self, capacity: int | None = None, addresses: AddressSource | None = None) -> None:
        self.capacity = capacity
        self.next_address = addresses or falling_addresses()
        self.stats = AllocatorStats()
        self.smallest_refusal: int | None = None
        """The least capacity that would have changed the course of events so far; None: no capacity would."""

    def has_room_for(self, size: int) -> bool:
        needed = self.stats.reserved + size
        if self.capacity is None or needed <= self.capacity:
            return True
        self.smallest_refusal = min(needed, self.smallest_refusal or needed)
        return False

    def gave(self, action: Action, address: int, size: int, stream: int) -> None:
        self.stats.driver_gave(size)

    def took_back(self, action: Action, address: int, size: int, stream: int) -> None:
        self.stats.driver_took_back(size)


DriverCall = tuple[int, Action, int, int, int]
"""At which event of a trace; action, address, size, stream."""


class NotingDriver(Driver):
    """Remembers what it was asked for."""

    def __init__(self, capacity: int | None = None, *, event: int = 0) -> None:
        super().__init__(capacity)
        self.event = event
        self.calls: list[DriverCall] = []

    def gave(self, action: Action, address: int, size: int, stream: int) -> None:
        super().gave(action, address, size, stream)
        self.calls.append((self.event, action, address, size, stream))

    def took_back(self, action: Action, address: int, size: int, stream: int) -> None:
        super().took_back(action, address, size, stream)
        self.calls.append((self.event, action, address, size, stream))
