"""Cards that are not there: for a demonstration, a test, or a laptop. Everything says that they are simulated.

Owns their uuids and what they show. The processes on them are real (the attempts that were started there); the
memory of a process is what COTENANT_SIM_MEMORY_MIB in its job's environment claims, 0 without it.
"""

from __future__ import annotations

import time
import uuid
from typing import Callable, Collection, List, Optional, Tuple

from cotenant.hostd.cards import Driver, OnCard, Sighting
from cotenant.hostd.protocol import CardLinks

#: What a simulated card claims to have.
MEMORY_MIB = 80 * 1024

#: One living process: pid, the uuids it was given, the memory it claims on each.
Claim = Tuple[int, Tuple[str, ...], int]


class SimulatedCards:
    """`count` simulated cards whose uuids are stable for one state directory (`state_id`)."""

    busy_interval_s: Optional[float] = None
    idle_interval_s: Optional[float] = None
    needs_new_process = False
    links: Tuple[CardLinks, ...] = ()

    def __init__(self, count: int, state_id: str, claims: Callable[[], List[Claim]]) -> None:
        space = uuid.uuid5(uuid.NAMESPACE_OID, f"cotenant/simulated/{state_id}")
        self._uuids = [f"SIM-{uuid.uuid5(space, str(index))}" for index in range(count)]
        self._claims = claims

    @property
    def driver(self) -> Driver:
        return Driver("simulated", f"{len(self._uuids)} simulated cards; no GPU is used")

    def last(self) -> List[Sighting]:
        claims = self._claims()
        return [self._sight(index, uuid_, claims) for index, uuid_ in enumerate(self._uuids)]

    async def look(self, uuids: Optional[Collection[str]] = None) -> List[Sighting]:
        return [card for card in self.last() if uuids is None or card.uuid in uuids]

    def close(self) -> None:
        pass

    def _sight(self, index: int, uuid_: str, claims: List[Claim]) -> Sighting:
        here = tuple(OnCard(pid, memory) for pid, given, memory in claims if uuid_ in given)
        return Sighting(
            index=index,
            uuid=uuid_,
            name="Simulated GPU",
            memory_mib=MEMORY_MIB,
            memory_used_mib=min(MEMORY_MIB, sum(one.memory_mib or 0 for one in here)),
            processes=here,
            simulated=True,
            seen_at=time.monotonic(),
        )
