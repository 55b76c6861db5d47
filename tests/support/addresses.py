"""Where segments lie, for tests in which it matters."""

from __future__ import annotations

from memfit.replay.driver import FIRST_ADDRESS, GAP, AddressSource


def rising_addresses(start: int = FIRST_ADDRESS) -> AddressSource:
    """Every segment above the one before; an address is not used again after a release."""

    def next_address(size: int, small: bool) -> int:
        nonlocal start
        address = start
        start += -(-size // GAP) * GAP + GAP
        return address

    return next_address
