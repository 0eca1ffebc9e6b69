"""Caps: what an owner, an agent, all agents together and everybody together may use.

An agent's grant needs agents' use + ask <= cap - reserve and everybody's use + ask <= cap; a person's only the
second. Owner and agent have caps of their own beside that. Lowering a cap takes nothing away: use is then above
it and every grant is refused until it has fallen.
"""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.server.deciding.usage import Use
from cotenant.server.deciding.words import cards_text, cards_up, quoted
from cotenant.server.deciding.world import UNITS_PER_CARD, Ask, Blocker, OwnerRules, PoolRules

UNLIMITED = UNITS_PER_CARD * 1_000_000_000
HOUR_MS = 3_600_000


@dataclass(frozen=True)
class Limit:
    """One cap on cards and what is used of it, in units of 1/840 card."""

    code: str
    cap: int
    used: int
    subject: str  # whose cap, as the subject of a sentence
    names: tuple[tuple[str, str], ...]
    set_by: str
    release: str  # who has to release something, in the infinitive phrase of `helps`

    def blocker(self, wanted: int) -> Blocker:
        """The refusal of `wanted` units."""
        left = max(0, self.cap - self.used)
        numbers = (
            ("cap", self.cap // UNITS_PER_CARD),
            ("used", cards_up(self.used)),
            ("wanted", cards_up(wanted)),
            ("free", left // UNITS_PER_CARD),
        )
        if wanted > self.cap:
            helps = f"ask for at most {cards_text(self.cap)}, or have a person raise the cap"
            if self.cap == 0:
                helps = "a person has to raise the cap"
        else:
            fewer = f"ask for at most {cards_text(left)} now, or " if left >= UNITS_PER_CARD else ""
            helps = f"{fewer}wait until {self.release}, or have a person raise the cap"
        message = f"{self.subject} {cards_text(self.cap)}: {cards_text(self.used)} used, {cards_text(wanted)} wanted"
        return Blocker(self.code, message, numbers, self.names, set_by=self.set_by, helps=helps)


def limits(use: Use, pool: PoolRules, owner: OwnerRules | None, ask: Ask) -> list[Limit]:
    """The caps on cards that hold for this ask. A missing one is left out: the cards there are limit by themselves."""
    who, agent, where = quoted(ask.owner), quoted(ask.agent), quoted(pool.name)
    found: list[Limit] = []
    if owner is not None and owner.cap is not None:
        found.append(
            Limit(
                "quota_owner",
                owner.cap * UNITS_PER_CARD,
                use.owner[ask.owner],
                f"the owner {who} may use in all pools together",
                (("owner", ask.owner),),
                owner.set_by,
                f"work of {who} ends",
            )
        )
    if pool.owner_cap is not None:
        found.append(
            Limit(
                "quota_owner",
                pool.owner_cap * UNITS_PER_CARD,
                use.owner_in[ask.owner, pool.name],
                f"the owner {who} may use in pool {where}",
                (("owner", ask.owner), ("pool", pool.name)),
                pool.set_by,
                f"work of {who} in this pool ends",
            )
        )
    if ask.own_cap:
        found.append(
            Limit(
                "quota_agent",
                ask.own_cap * UNITS_PER_CARD,
                use.caller[ask.agent],
                f"the token of {agent} allows in all pools together",
                (("agent", ask.agent),),
                "token",
                f"work of {agent} ends",
            )
        )
    if pool.agent_cap is not None and not ask.human:
        found.append(
            Limit(
                "quota_agent",
                pool.agent_cap * UNITS_PER_CARD,
                use.caller_in[ask.agent, pool.name],
                f"an agent may use in pool {where}",
                (("agent", ask.agent), ("pool", pool.name)),
                pool.set_by,
                f"work of {agent} in this pool ends",
            )
        )
    if pool.cap is not None:
        found.append(
            Limit(
                "quota_pool",
                pool.cap * UNITS_PER_CARD,
                use.all[pool.name],
                f"everybody together may use in pool {where}",
                (("pool", pool.name),),
                pool.set_by,
                "work in this pool ends",
            )
        )
    if pool.reserve and not ask.human:
        cap = use.cards[pool.name] if pool.cap is None else pool.cap * UNITS_PER_CARD
        found.append(
            Limit(
                "reserve",
                max(0, cap - pool.reserve * UNITS_PER_CARD),
                use.agents[pool.name],
                f"{cards_text(pool.reserve * UNITS_PER_CARD)} of pool {where} are kept for people; agents together may use",
                (("pool", pool.name),),
                pool.set_by,
                "work of agents in this pool ends",
            )
        )
    return found


def room(found: list[Limit]) -> int:
    """Units that may still be taken under all of these caps; UNLIMITED without any."""
    return min((max(0, limit.cap - limit.used) for limit in found), default=UNLIMITED)


def at_once(use: Use, pool: PoolRules, owner: OwnerRules | None, ask: Ask) -> list[Blocker]:
    """The caps on jobs at once that are reached. Asks without a card count like the others."""
    found: list[Blocker] = []

    def check(cap: int | None, used: int, who: str, names: tuple[tuple[str, str], ...], set_by: str) -> None:
        if cap is None or used < cap:
            return
        helps = f"wait until one of {used} ends, or release one" if cap else "a person has to raise the cap"
        found.append(
            Blocker(
                "jobs_at_once",
                f"{who} may have {cap} jobs and leases at once: {used} are there, 1 more is wanted",
                (("cap", cap), ("used", used), ("wanted", 1)),
                names,
                set_by=set_by,
                helps=helps,
            )
        )

    where = f"in pool {quoted(pool.name)}"
    if owner is not None:
        check(
            owner.jobs,
            use.jobs[ask.owner],
            f"the owner {quoted(ask.owner)}",
            (("owner", ask.owner),),
            owner.set_by,
        )
    check(
        pool.owner_jobs,
        use.owner_jobs_in[ask.owner, pool.name],
        f"the owner {quoted(ask.owner)} {where}",
        (("owner", ask.owner), ("pool", pool.name)),
        pool.set_by,
    )
    if not ask.human:
        check(
            pool.agent_jobs,
            use.caller_jobs_in[ask.agent, pool.name],
            f"the agent {quoted(ask.agent)} {where}",
            (("agent", ask.agent), ("pool", pool.name)),
            pool.set_by,
        )
    return found


def hours(use: Use, owner: OwnerRules | None, ask: Ask) -> list[Blocker]:
    """The cap on GPU-hours of the last 24 h, where it is used up. It stops asks for cards only."""
    if owner is None or owner.gpu_hours is None or ask.needs.gpus_max == 0:
        return []
    used = use.gpu_ms.get(ask.owner, 0)
    if used < owner.gpu_hours * HOUR_MS:
        return []
    return [
        Blocker(
            "gpu_hours",
            f"the owner {quoted(ask.owner)} may use {owner.gpu_hours} GPU-hours in 24 h: {used // HOUR_MS} used",
            (("cap", owner.gpu_hours), ("used", used // HOUR_MS)),
            (("owner", ask.owner),),
            set_by=owner.set_by,
            helps="wait: hours older than a day fall out by themselves, or have a person raise the cap",
        )
    ]


def ever(found: list[Limit], wanted: int) -> Limit | None:
    """The first cap that `wanted` units are above even when nothing is used."""
    return next((limit for limit in found if wanted > limit.cap), None)
