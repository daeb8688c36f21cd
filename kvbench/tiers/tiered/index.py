"""What the tiered store knows of each block in each tier: none → pending → ready → leaving → none."""

from collections import deque
from typing import Literal

from kvbench.core.block_key import BlockKey
from kvbench.core.eviction import EvictionOrder, Usage
from kvbench.tiers.tiered.settings import TierSettings

# pending: room is or will be reserved and the bytes are on their way. ready: whole, a look-up sees it. leaving: no
# look-up sees it any more, the tier is about to let go of it.
State = Literal["pending", "ready", "leaving"]

# Blocks that left otherwise stay in the queue of those that expire until there are this many, and as many as are ready.
_FORGOTTEN = 1024


class Record:
    """One block in all tiers; without slots it is only remembered, for its accesses."""

    __slots__ = ("hot", "key", "last_request", "name", "num_bytes", "pinned", "ready", "slots", "usage")

    def __init__(self, key: BlockKey, name: bytes, num_bytes: int, num_tiers: int) -> None:
        self.key = key
        self.name = name
        self.num_bytes = num_bytes
        self.slots: list[Slot | None] = [None] * num_tiers
        self.ready = 0  # one bit per tier
        self.usage = Usage()
        self.last_request = ""
        self.pinned = 0  # one bit per tier, by the caller
        self.hot = 0  # one bit per tier, by heat


class Slot:
    """One block in one tier."""

    __slots__ = ("cancelled", "crc32c", "readers", "record", "state", "tier")

    def __init__(self, record: Record, tier: int, crc32c: int | None) -> None:
        self.record = record
        self.tier = tier
        self.crc32c = crc32c
        self.state: State = "pending"
        self.readers = 0
        self.cancelled = False

    @property
    def usage(self) -> Usage:
        return self.record.usage

    @property
    def num_bytes(self) -> int:
        return self.record.num_bytes

    @property
    def resident(self) -> bool:
        return self.state == "ready"

    @property
    def busy(self) -> bool:
        return self.readers > 0

    @property
    def kept(self) -> bool:
        return bool((self.record.pinned | self.record.hot) >> self.tier & 1)


class TierIndex:
    """The slots of one tier, its room, and who leaves next. The store's lock guards it."""

    def __init__(self, number: int, settings: TierSettings) -> None:
        self.number = number
        self.settings = settings
        self.name = settings.tier.name
        self.enabled = settings.enabled
        capacity = settings.capacity_bytes
        own = settings.tier.stats().capacity_bytes
        self.capacity_bytes = min((c for c in (capacity, own) if c is not None), default=None)
        self.order: EvictionOrder[Slot] = EvictionOrder(settings.eviction, cooldown_s=settings.cooldown_s)
        self.pending_blocks = self.pending_bytes = 0
        self.reserved_bytes = 0
        self.ready_blocks = self.ready_bytes = 0
        self.leaving_blocks = 0
        self._expiring: deque[tuple[float, Slot]] = deque()

    @property
    def writable(self) -> bool:
        return self.enabled and not self.settings.read_only

    def pend(self, record: Record, crc32c: int | None) -> Slot:
        """Turns nothing into pending."""
        slot = record.slots[self.number] = Slot(record, self.number, crc32c)
        self.pending_blocks += 1
        self.pending_bytes += record.num_bytes
        return slot

    def room_for(self, record: Record) -> list[Slot] | None:
        """Reserves room for a pending block: the slots that leave for it (now leaving), or None if it does not fit."""
        needed = record.num_bytes
        if self.capacity_bytes is not None:
            missing = self.ready_bytes + self.reserved_bytes + needed - self.capacity_bytes
            if missing > 0:
                if needed > self.capacity_bytes:
                    return None
                victims = self.order.take(missing, before=record.usage.sequence)
                if victims is None:
                    return None
                for slot in victims:
                    self.leave(slot)
                self.reserved_bytes += needed
                return victims
        self.reserved_bytes += needed
        return []

    def make_ready(self, slot: Slot, now_s: float, *, reserved: bool) -> None:
        """Turns pending into ready."""
        self._end_pending(slot, reserved)
        slot.state = "ready"
        slot.record.ready |= 1 << self.number
        self.ready_blocks += 1
        self.ready_bytes += slot.num_bytes
        self.order.add(slot)
        if self.settings.ttl_s is not None:
            self._expiring.append((now_s + self.settings.ttl_s, slot))
            if len(self._expiring) > 2 * self.ready_blocks + _FORGOTTEN:
                self._expiring = deque(item for item in self._expiring if item[1].state == "ready")

    def give_up(self, slot: Slot, *, reserved: bool) -> None:
        """Turns pending into nothing."""
        self._end_pending(slot, reserved)
        slot.record.slots[self.number] = None

    def leave(self, slot: Slot) -> None:
        """Turns ready into leaving."""
        slot.state = "leaving"
        slot.record.ready &= ~(1 << self.number)
        self.ready_blocks -= 1
        self.ready_bytes -= slot.num_bytes
        self.leaving_blocks += 1

    def gone(self, slot: Slot) -> None:
        """Turns leaving into nothing."""
        self.leaving_blocks -= 1
        slot.record.slots[self.number] = None

    def candidates(self, now_s: float) -> list[Slot]:
        """Marks what must cool above the high watermark, and returns what has cooled (now leaving)."""
        if self.capacity_bytes is None or not self.writable:
            return []
        held = self.ready_bytes + self.reserved_bytes
        if held - self.order.cooling_bytes > self.settings.high_watermark * self.capacity_bytes:
            target = int(self.settings.low_watermark * self.capacity_bytes)
            self.order.mark(held - self.order.cooling_bytes - target, now_s)
        cooled = self.order.cooled(now_s)
        for slot in cooled:
            self.leave(slot)
        return cooled

    def expired(self, now_s: float) -> list[Slot]:
        """Takes out the blocks whose time is over (now leaving); those being read follow when they are read."""
        if not self.enabled or not self._expiring or self._expiring[0][0] > now_s:
            return []
        over, reading = [], []
        while self._expiring and self._expiring[0][0] <= now_s:
            at, slot = self._expiring.popleft()
            if slot.state != "ready":
                continue
            if slot.readers:
                reading.append((at, slot))
                continue
            self.leave(slot)
            over.append(slot)
        self._expiring.extendleft(reversed(reading))
        return over

    def _end_pending(self, slot: Slot, reserved: bool) -> None:
        self.pending_blocks -= 1
        self.pending_bytes -= slot.num_bytes
        if reserved:
            self.reserved_bytes -= slot.num_bytes
