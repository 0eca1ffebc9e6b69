"""What hosts see of themselves: cards and facts, taken into the live picture, and into the records where they are news."""

from __future__ import annotations

from cotenant.hostd.protocol import CardProcess, CardState, HostFacts
from cotenant.server.control.context import Context
from cotenant.server.live import LiveCard, LiveHost
from cotenant.server.model.caller import LOOP
from cotenant.server.model.text import clean
from cotenant.server.store import events, leases
from cotenant.server.store import hosts as rows
from cotenant.server.store.db import Tx


class Sightings:
    """Writes `Live`; the keeper and every list read it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._strangers: dict[str, frozenset[int]] = {}  # card -> pids that were named already
        self._written: dict[str, set[str]] = {}  # host -> cards that are in the records, or on their way there
        self._claims: dict[
            str, dict[str, str]
        ] = {}  # host -> its cards that the records give to another host, told once

    def see(self, host: str, cards: tuple[CardState, ...], facts: HostFacts, now: int) -> None:
        """All that a host sees of itself at this moment."""
        context = self._context
        live = context.live.hosts.setdefault(host, LiveHost())
        live.facts, live.at_ms = facts, now
        seen = {card.uuid for card in cards}
        for card in cards:
            self.see_card(host, card, now)
        written, claims = self._written.setdefault(host, set()), self._claims.setdefault(host, {})
        for uuid in claims.keys() - seen:
            del claims[uuid]  # should it claim the card again, that is news
        new = tuple(card for card in cards if card.uuid not in written and card.uuid not in claims)
        if new and context.db.peek(lambda c: rows.get(c, host)) is not None:
            # not there at the hello: a driver that came up later, a card that came back
            written |= {card.uuid for card in new}
            context.background_task(self._write_new(host, new, now))
        for uuid, known in context.live.cards.items():
            if known.host == host and uuid not in seen and known.state.state != "lost":
                gone = CardState(known.state.index, uuid, known.state.name, known.state.memory_mib, state="lost", reason="the driver does not list it",
                                 simulated=known.state.simulated)  # fmt: skip
                self.see_card(host, gone, now)
        self.publish(host)

    async def _write_new(self, host: str, cards: tuple[CardState, ...], now: int) -> None:
        try:
            claims = await self._context.db.write(lambda tx: self.greet(tx, host, cards, now, all_of_them=False))
        except BaseException:
            self._written[host] -= {card.uuid for card in cards}  # the next telemetry tries again
            raise
        self.wrote(host, cards, claims, all_of_them=False)

    def wrote(self, host: str, cards: tuple[CardState, ...], claims: dict[str, str], *, all_of_them: bool) -> None:
        """What `greet` wrote is committed."""
        mine = {card.uuid for card in cards} - claims.keys()
        self._written[host] = mine if all_of_them else self._written.get(host, set()) - claims.keys() | mine
        self._claims.setdefault(host, {}).update(claims)

    def see_card(self, host: str, card: CardState, now: int) -> None:
        """One card as it is now; a change of its state is written down."""
        context = self._context
        known = context.live.cards.get(card.uuid)
        if known is not None and known.host != host:
            moved = known.state.state == "lost" and card.uuid in self._written.get(host, ())
            if not moved:
                return
        context.live.cards[card.uuid] = LiveCard(card, host, now - card.observed_ago_ms)
        context.keeper.see_card_work(host, card.uuid, _worked(known, card), now - card.observed_ago_ms)
        self._note_strangers(host, card, now)
        if known is None or known.state.state != card.state:
            context.keeper.observe_cards()
            context.wake()
            if known is not None or card.state != "ok":
                self._card_changed(host, card, known.state.state if known else None, now)

    def _note_strangers(self, host: str, card: CardState, now: int) -> None:
        """Name whoever uses a leased card without its lease, once for each process. Nobody is signalled."""
        lease_id = self._context.keeper.holder_of(host, card.uuid)
        strangers = {
            p.pid: p
            for p in card.processes
            if lease_id is not None and p.attempt_id is None and not p.resident and p.lease_id != lease_id
        }
        known = self._strangers.get(card.uuid, frozenset())
        self._strangers[card.uuid] = frozenset(strangers)
        for pid in sorted(strangers.keys() - known):
            self._context.background_task(self._write_bypass(host, card.uuid, str(lease_id), strangers[pid], now))

    async def _write_bypass(self, host: str, uuid: str, lease_id: str, process: CardProcess, now: int) -> None:
        who = f"pid {process.pid} of {clean(process.user or 'an unknown user', 40)}"

        def write(tx: Tx) -> None:
            owner = leases.get(tx, lease_id)["owner"]
            events.append(tx, "gpu.bypass", LOOP, now, owner=owner, severity="warning", lease_id=lease_id, host=host, gpu_uuid=uuid,
                          reason=f"{who} uses the leased card without the lease", args={"memory_mib": process.memory_mib})  # fmt: skip

        await self._context.db.write(write)

    def _card_changed(self, host: str, card: CardState, old: str | None, now: int) -> None:
        severity = "info" if card.state == "ok" else "critical" if card.state in ("sick", "lost") else "warning"

        def write(tx: Tx) -> None:
            events.append(tx, "gpu.changed", LOOP, now, severity=severity, host=host, gpu_uuid=card.uuid, old=old, new=card.state,
                          reason=clean(card.reason or "", 300) or None)  # fmt: skip

        async def note() -> None:
            await self._context.db.write(write)

        self._context.background_task(note())

    def publish(self, host: str) -> None:
        """Tell who listens that this host or one of its cards looks different."""
        addresses = {"cotenant://gpus", f"cotenant://hosts/{host}", "cotenant://quota/me"}
        addresses |= {
            f"cotenant://hosts/{host}/gpus/{card.state.index}"
            for card in self._context.live.cards.values()
            if card.host == host
        }
        self._context.changes.publish(frozenset(addresses))

    def greet(self, tx: Tx, name: str, cards: tuple[CardState, ...], now: int, *, all_of_them: bool) -> dict[str, str]:
        """Write the cards down; with `all_of_them` those of the host that are not among them are absent.

        Returns the cards that the records give to another host entry, with its name; call `wrote` after the commit.
        """
        claims: dict[str, str] = {}
        settings = self._context.settings.hosts.get(name)
        for card in cards:
            pool, shares = self._context.settings.default_pool, 1
            if settings is not None:
                by_index = str(card.index)
                pool = settings.pools_by_gpu.get(card.uuid, settings.pools_by_gpu.get(by_index, settings.pool))
                shares = settings.shares.get(card.uuid, settings.shares.get(by_index, 1))
            new, other = rows.put_gpu(
                tx, card.uuid, name, now, idx=card.index, name=clean(card.name, 120), memory_mib=card.memory_mib,
                capability=card.compute_capability or "", pool=pool, shares=shares, simulated=int(card.simulated),
            )  # fmt: skip
            if other is not None:
                claims[card.uuid] = other
            if other is not None and self._claims.get(name, {}).get(card.uuid) != other:
                events.append(tx, "gpu.changed", LOOP, now, severity="critical", host=name, gpu_uuid=card.uuid, new="refused",
                              reason=f"the card belongs to host {other} already")  # fmt: skip
            if new:
                events.append(
                    tx, "gpu.added", LOOP, now, host=name, gpu_uuid=card.uuid, pool=pool, new=clean(card.name, 120)
                )
        tx.dirty.add(("host", name))
        if all_of_them:
            gone = rows.absent(tx, name, [card.uuid for card in cards])
            for other_claims in self._claims.values():
                for uuid in gone:
                    other_claims.pop(uuid, None)  # who claims it may have it now: the next telemetry asks again
        return claims


def _worked(before: LiveCard | None, card: CardState) -> bool | None:
    """Whether a card did something since it was last looked at; None where it does not tell its use."""
    if card.util_pct is None:
        return None
    if card.util_pct > 0 or before is None:
        return card.util_pct > 0
    return before.state.memory_used_mib != card.memory_used_mib or [p.pid for p in before.state.processes] != [
        p.pid for p in card.processes
    ]
