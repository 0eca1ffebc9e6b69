"""Rules that people set at run time, and cards that they book in advance. Only people come here (`operate`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from cotenant.server.clock import iso
from cotenant.server.config import NAME, RULE_KEYS, check_rule
from cotenant.server.control.context import Context
from cotenant.server.deciding.draining import draining
from cotenant.server.deciding.windows import window_text
from cotenant.server.deciding.world import AgentRules, OwnerRules, PoolRules, Reservation
from cotenant.server.errors import BadRequest, NotFound
from cotenant.server.model.caller import Caller
from cotenant.server.model.rules import SCOPES, Rules, Setting
from cotenant.server.model.text import quoted
from cotenant.server.store import events, rules
from cotenant.server.store.db import Tx, dumps

#: The longest that cards can be booked in advance, and the longest booking.
AHEAD_MS: Final = 366 * 86_400_000
RESERVATIONS_MAX: Final = 1000


@dataclass(frozen=True)
class Excess:
    """A lease above a rule: it finishes what it has, or a person ends it."""

    lease_id: str
    job_id: str | None
    holder: str
    owner: str
    cards: int


class RuleBook:
    """Reads and changes the rules. A change wakes the loop: raising acts at once, lowering makes the excess drain."""

    def __init__(self, context: Context) -> None:
        self._context = context

    # ---- rules

    async def set(self, caller: Caller, scope: str, name: str, key: str, value: Any, reason: str) -> dict[str, Any]:
        """Set a rule above the configuration; `value` None takes a cap away.

        Answers old and new value, and the excess: the living leases that the rules now make drain.

        Raises:
            BadRequest: no such scope, key or name, or a value that it cannot have.
            NotFound: no such pool.
        """
        self._known(scope, name, key)
        try:
            value = check_rule(scope, key, value)
        except ValueError as error:
            raise BadRequest(f"{scope} {quoted(name)}: {key} {error}") from None
        return await self._change(caller, scope, name, key, reason, value)

    async def reset(self, caller: Caller, scope: str, name: str, key: str, reason: str) -> dict[str, Any]:
        """Let the configuration hold again for one rule. Answers as `set`."""
        self._known(scope, name, key)
        return await self._change(caller, scope, name, key, reason, _CONFIGURED)

    async def _change(self, caller: Caller, scope: str, name: str, key: str, reason: str, value: Any) -> dict[str, Any]:
        context, now = self._context, self._context.now()

        def write(tx: Tx) -> tuple[Any, Any]:
            base = context.settings.rules
            old = _value(rules.read(tx.connection, base, now), scope, name, key)
            if value is _CONFIGURED:
                rules.drop(tx, scope, name, key)
            else:
                rules.put(tx, Setting(scope, name, key, value, caller.name, now, reason))
            after = rules.read(tx.connection, base, now)
            new = _value(after, scope, name, key)
            if scope == "pool":
                _consistent(after.pools[name])
            events.append(
                tx, "rules.changed", caller, now, severity="warning", pool=name if scope == "pool" else None,
                owner=name if scope == "owner" else None, old=dumps(old), new=dumps(new), reason=reason,
                args={"scope": scope, "name": name, "key": key, "configured": value is _CONFIGURED},
            )  # fmt: skip
            return old, new

        old, new = await context.db.write(write)
        context.wake()
        excess = self.excess(name if scope == "pool" else None)
        return {
            "scope": scope, "name": name, "key": key, "old": old, "new": new,
            "set_by": "configuration" if value is _CONFIGURED else caller.name, "set_at": iso(now), "reason": reason,
            "still_to_end_cards": sum(one.cards for one in excess), "excess": [vars(one) for one in excess],
        }  # fmt: skip

    def _known(self, scope: str, name: str, key: str) -> None:
        if scope not in SCOPES:
            raise BadRequest(f"scope must be one of {', '.join(SCOPES)}, not {quoted(scope, 40)}")
        if scope == "pool" and name not in self._context.settings.pools:
            known = ", ".join(quoted(pool) for pool in sorted(self._context.settings.pools))
            raise NotFound(
                f"there is no pool {quoted(name, 64)}",
                code="no_such_pool",
                hint=f"Pools: {known}. A new one needs a section in cotenant.toml and a restart.",
            )
        if not NAME.fullmatch(name) and "@" not in name:
            raise BadRequest(f"{quoted(name, 64)} can be no {scope}'s name")
        if key not in RULE_KEYS[scope]:
            raise BadRequest(
                f"a {scope} has no rule {quoted(key, 40)}", hint=f"It has {', '.join(sorted(RULE_KEYS[scope]))}."
            )

    def show(self) -> dict[str, Any]:
        """Every rule that is in force: value, who set it, when and why; what is set by the configuration has no time."""
        context = self._context
        context.keeper.refresh(context.now())
        in_force = context.keeper.rules
        found = context.db.peek(rules.settings)
        settings = {(one.scope, one.name, one.key): one for one in found}
        listed: list[dict[str, Any]] = []
        for scope, names in (("pool", in_force.pools), ("owner", in_force.owners), ("agent", in_force.agents)):
            for name in sorted(names):
                for key in RULE_KEYS[scope]:
                    value = _value(in_force, scope, name, key)
                    set_here = settings.get((scope, name, key))
                    if set_here is None and value in (None, False, [], 0, ""):
                        continue
                    listed.append(
                        {
                            "scope": scope, "name": name, "key": key, "value": value,
                            "set_by": set_here.set_by if set_here else "configuration",
                            "set_at": iso(set_here.set_at_ms) if set_here else None,
                            "reason": set_here.reason if set_here else "",
                        }
                    )  # fmt: skip
        waiting = [one for one in found if one.scope == "pool" and one.name not in in_force.pools]
        return {
            "rules": listed,
            "reservations": [self._told(one) for one in in_force.reservations],
            "without_pool": [f"{one.name}.{one.key}" for one in waiting],
        }

    def excess(self, pool: str | None = None) -> list[Excess]:
        """The living leases that drain (of one pool, or of all): the newest and lowest above a rule, by id."""
        context = self._context
        context.keeper.refresh(context.now())
        world = context.keeper.world(waiting=False)
        marked = draining(world)
        return [
            Excess(lease.id, lease.job_id, lease.agent, lease.owner, len({key[:2] for key in lease.slots if key[1] != "cpu"}))
            for lease in sorted(world.holdings, key=lambda one: one.id)
            if lease.id in marked and (pool is None or lease.pool == pool)
        ]  # fmt: skip

    # ---- advance reservations

    async def reserve(
        self, caller: Caller, pool: str, owner: str, cards: int, begin_ms: int, end_ms: int, reason: str
    ) -> dict[str, Any]:
        """Book cards of a pool for an owner.

        Raises:
            BadRequest: times that cannot be meant, or more cards than the pool has beside other bookings.
            NotFound: no such pool.
        """
        context, now = self._context, self._context.now()
        self._known("pool", pool, "cap")
        if not NAME.fullmatch(owner) and "@" not in owner:
            raise BadRequest(f"{quoted(owner, 64)} can be no owner's name")
        begin_ms = max(begin_ms, now)
        if end_ms <= begin_ms:
            raise BadRequest("the reservation would end before it begins", hint="Give a later end.")
        if end_ms - now > AHEAD_MS:
            raise BadRequest("a reservation must end within a year")
        context.keeper.refresh(now)
        there = sum(1 for slot in context.keeper.slots() if slot.pool == pool and slot.kind == "gpu" and not slot.share)
        cap = context.keeper.rules.pools[pool].cap
        most = there if cap is None else min(there, cap)
        reservation_id = context.ids.new("reservation", now)
        values = {
            "id": reservation_id, "pool": pool, "owner": owner, "cards": cards, "begin_ms": begin_ms, "end_ms": end_ms,
            "set_by": caller.name, "set_at_ms": now, "reason": reason,
        }  # fmt: skip

        def write(tx: Tx) -> Reservation:
            coming = rules.coming(tx.connection, now)
            if len(coming) >= RESERVATIONS_MAX:
                raise BadRequest(f"there are {len(coming)} reservations already", hint="Remove some first.")
            beside = _most_at_once([one for one in coming if one.pool == pool], begin_ms, end_ms)
            if not 1 <= cards <= most - beside:
                raise BadRequest(
                    f"{cards} cards cannot be reserved: pool {quoted(pool)} has {most}, of which {beside} are reserved then",
                    code="not_enough_cards",
                    hint=f"Ask for at most {most - beside}." if most > beside else "Choose another time or pool.",
                )
            rules.add_reservation(tx, values)
            events.append(
                tx, "reservation.added", caller, now, owner=owner, pool=pool, new=reservation_id, reason=reason,
                args={"cards": cards, "begin_ms": begin_ms, "end_ms": end_ms},
            )  # fmt: skip
            return Reservation(reservation_id, pool, owner, cards, begin_ms, end_ms, caller.name)

        made = await context.db.write(write)
        context.wake()
        return self._told(made)

    async def unreserve(self, caller: Caller, reservation_id: str, reason: str) -> dict[str, Any]:
        """Take a reservation back.

        Raises:
            NotFound: no such reservation, or it is over.
        """
        context, now = self._context, self._context.now()

        def write(tx: Tx) -> None:
            row = rules.remove_reservation(tx, reservation_id, caller.name, now)
            if row is None:
                raise NotFound(
                    f"there is no reservation {quoted(reservation_id, 40)} that is not over",
                    hint="cotenant reserve list shows them.",
                )
            events.append(
                tx,
                "reservation.removed",
                caller,
                now,
                owner=row["owner"],
                pool=row["pool"],
                old=reservation_id,
                reason=reason,
            )

        await context.db.write(write)
        context.wake()
        return {"reservation_id": reservation_id, "removed": True}

    def _told(self, one: Reservation) -> dict[str, Any]:
        return {
            "reservation_id": one.id, "pool": one.pool, "owner": one.owner, "cards": one.cards, "begins_at": iso(one.begin_ms),
            "ends_at": iso(one.end_ms), "set_by": one.set_by,
        }  # fmt: skip


#: In place of a value: the configuration holds again.
_CONFIGURED: Final = object()


def _value(in_force: Rules, scope: str, name: str, key: str) -> Any:
    """A rule as JSON has it."""
    of: PoolRules | OwnerRules | AgentRules
    if scope == "pool":
        of = in_force.pools[name]
    elif scope == "owner":
        of = in_force.owners.get(name) or OwnerRules(name)
    else:
        of = in_force.agents.get(name) or AgentRules(name)
    value = getattr(of, key)
    if key == "windows":
        return [window_text(window) for window in value]
    return list(value) if isinstance(value, tuple) else value


def _consistent(pool: PoolRules) -> None:
    if pool.cap is not None and pool.reserve > pool.cap:
        raise BadRequest(
            f"reserve {pool.reserve} would be above cap {pool.cap} of pool {quoted(pool.name)}",
            hint="Lower the reserve first, or raise the cap.",
        )


def _most_at_once(bookings: list[Reservation], begin_ms: int, end_ms: int) -> int:
    """The most cards that these bookings keep at one moment between two times."""
    over = [one for one in bookings if one.begin_ms < end_ms and one.end_ms > begin_ms]
    return max(
        (sum(o.cards for o in over if o.begin_ms <= max(one.begin_ms, begin_ms) < o.end_ms) for one in over), default=0
    )
