"""Caps: what an owner, an agent, all agents together and everybody together may use.

An agent's grant needs agents' use + ask <= cap - reserve and everybody's use + ask <= cap; a person's only the
second. Owner and agent have caps of their own beside that. Lowering a cap takes nothing away: use is then above
it and every grant is refused until it has fallen.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cotenant.server.deciding.usage import Use
from cotenant.server.deciding.words import cards_text, cards_up, quoted
from cotenant.server.deciding.world import UNITS_PER_CARD, AgentRules, Ask, Blocker, OwnerRules, PoolRules

UNLIMITED = UNITS_PER_CARD * 1_000_000_000
HOUR_MS = 3_600_000

Names = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Limit:
    """One cap that holds for an asker, and where the running sum that it is compared with stands.

    The cap is in units of 1/840 card, or leases at once for ``jobs_at_once``.
    """

    code: str
    cap: int
    sums: Mapping[Any, int]
    key: Hashable
    subject: str  # what the message begins with; the cap follows
    names: Names
    set_by: str
    until: str  # what has to happen for the use to fall

    @property
    def used(self) -> int:
        return self.sums[self.key]

    def refuse(self, wanted: int) -> Blocker:
        """The refusal of `wanted` units of cards, or of one more lease."""
        if self.code == "jobs_at_once":
            return self._refuse_job()
        cap, used = self.cap, self.used
        left = max(0, cap - used)
        if wanted > cap:
            helps = "have a person raise the cap"
            if cap >= UNITS_PER_CARD:
                helps = f"ask for at most {cards_text(cap // UNITS_PER_CARD * UNITS_PER_CARD)}, or {helps}"
        else:
            helps = f"wait until {self.until}, or have a person raise the cap"
            if left >= UNITS_PER_CARD:
                helps = f"ask for at most {cards_text(left // UNITS_PER_CARD * UNITS_PER_CARD)} now, or {helps}"
        return Blocker(
            self.code,
            f"{self.subject} at most {cards_text(cap)}: {cards_text(used, noun=False)} used,"
            f" {cards_text(wanted, noun=False)} wanted",
            (
                ("cap", cap // UNITS_PER_CARD),
                ("used", cards_up(used)),
                ("wanted", cards_up(wanted)),
                ("free", left // UNITS_PER_CARD),
            ),
            self.names,
            set_by=self.set_by,
            helps=helps,
        )

    def _refuse_job(self) -> Blocker:
        return Blocker(
            self.code,
            f"{self.subject} at most {self.cap} jobs and leases at once: {self.used} there, 1 more wanted",
            (("cap", self.cap), ("used", self.used), ("wanted", 1)),
            self.names,
            set_by=self.set_by,
            helps=f"wait until {self.until}, or have a person raise the cap"
            if self.cap
            else "have a person raise the cap",
        )


@dataclass(frozen=True)
class Limits:
    """All caps that hold for one asker in one pool, in the order in which they are told."""

    cards: tuple[Limit, ...]
    jobs: tuple[Limit, ...]
    gpu_hours: tuple[Limit, ...]

    @property
    def pool_wide(self) -> bool:
        """Whether one of them is shared by everybody, or all agents, of the pool."""
        return any(limit.code in ("quota_pool", "reserve") for limit in self.cards)

    def busy(self) -> bool:
        """Whether a cap on jobs at once refuses one more."""
        return any(limit.sums[limit.key] >= limit.cap for limit in self.jobs)

    def spent(self) -> bool:
        """Whether a cap on GPU-hours is used up."""
        return any(limit.sums[limit.key] >= limit.cap * HOUR_MS for limit in self.gpu_hours)

    def room(self) -> int:
        """Units of cards that may still be taken; UNLIMITED without any cap."""
        room = UNLIMITED
        for limit in self.cards:
            left = limit.cap - limit.sums[limit.key]
            room = min(room, left)
        return max(0, room)

    def reached(self, wanted: int) -> list[Limit]:
        """The caps on cards that refuse `wanted` units now."""
        return [limit for limit in self.cards if wanted > limit.cap - limit.sums[limit.key]]

    def jobs_reached(self) -> list[Limit]:
        """The caps on jobs at once that refuse one more."""
        return [limit for limit in self.jobs if limit.sums[limit.key] >= limit.cap]

    def ever(self, wanted: int) -> Limit | None:
        """The first cap that an ask for `wanted` units is above by itself, even when nothing is used."""
        for limit in self.cards:
            if wanted > limit.cap:
                return limit
        return next((limit for limit in self.jobs if limit.cap == 0), None)

    def hours_used_up(self) -> list[Blocker]:
        """The caps on GPU-hours of the last 24 h that are used up. They stop asks for cards only."""
        return [
            Blocker(
                "gpu_hours",
                f"{limit.subject} at most {limit.cap} GPU-hours in 24 h: {limit.sums[limit.key] // HOUR_MS} used",
                (("cap", limit.cap), ("used", limit.sums[limit.key] // HOUR_MS)),
                limit.names,
                set_by=limit.set_by,
                helps="wait: hours older than a day fall out by themselves; or have a person raise the cap",
            )
            for limit in self.gpu_hours
            if limit.sums[limit.key] >= limit.cap * HOUR_MS
        ]


def limits_for(use: Use, pool: PoolRules, owner: OwnerRules | None, agent: AgentRules | None, ask: Ask) -> Limits:
    """The caps that hold for the asker of `ask`. A missing one is left out: the cards there are limit by themselves."""
    mine, caller, where = quoted(ask.owner), quoted(ask.agent), quoted(pool.name)
    of_owner: Names = (("owner", ask.owner),)
    in_pool: Names = (("pool", pool.name),)
    of_agent: Names = (("agent", ask.agent),)
    owner_in, caller_in = (ask.owner, pool.name), (ask.agent, pool.name)
    over_all = f"over all pools the owner {mine} may have"
    in_this = f"in pool {where} the owner {mine} may have"
    an_agent = f"in pool {where} the agent {caller} may have"
    everywhere = f"over all pools the agent {caller} may have"
    everybody = f"in pool {where} everybody together may have"
    cards: list[Limit] = []
    jobs: list[Limit] = []
    hours: list[Limit] = []

    def card_cap(code: str, cap: int | None, sums: Mapping[Any, int], key: Hashable, *rest: Any) -> None:
        if cap is not None:
            cards.append(Limit(code, max(0, cap) * UNITS_PER_CARD, sums, key, *rest))

    def job_cap(cap: int | None, sums: Mapping[Any, int], key: Hashable, *rest: Any) -> None:
        if cap is not None:
            jobs.append(Limit("jobs_at_once", max(0, cap), sums, key, *rest))

    def hour_cap(cap: int | None, sums: Mapping[Any, int], key: Hashable, said: str, of: Names, by: str) -> None:
        if cap is not None:
            hours.append(Limit("gpu_hours", max(0, cap), sums, key, said, of, by, until=""))

    who = pool.who_set
    if owner is not None:
        by = owner.set_by
        card_cap("quota_owner", owner.cap, use.owner, ask.owner, over_all, of_owner, by, f"work of {mine} ends")
        job_cap(owner.jobs, use.jobs, ask.owner, over_all, of_owner, by, f"one of {mine} ends")
        hour_cap(owner.gpu_hours, use.day_owner, ask.owner, over_all, of_owner, by)
    names = of_owner + in_pool
    ends = f"work of {mine} in this pool ends"
    card_cap("quota_owner", pool.owner_cap, use.owner_in, owner_in, in_this, names, who("owner_cap"), ends)
    one_ends = f"one of {mine} in this pool ends"
    job_cap(pool.owner_jobs, use.owner_jobs_in, owner_in, in_this, names, who("owner_jobs"), one_ends)
    hour_cap(pool.owner_gpu_hours, use.day_owner_in, owner_in, in_this, names, who("owner_gpu_hours"))
    token = f"over all pools the token of {caller} allows"
    ends = f"work of {caller} ends"
    card_cap("quota_agent", ask.own_cap or None, use.caller, ask.agent, token, of_agent, "token", ends)
    if agent is not None:
        by = agent.set_by
        card_cap("quota_agent", agent.cap, use.caller, ask.agent, everywhere, of_agent, by, ends)
        job_cap(agent.jobs, use.caller_jobs, ask.agent, everywhere, of_agent, by, f"one of {caller} ends")
        hour_cap(agent.gpu_hours, use.day_caller, ask.agent, everywhere, of_agent, by)
    if not ask.human:
        names = of_agent + in_pool
        ends = f"work of {caller} in this pool ends"
        card_cap("quota_agent", pool.agent_cap, use.caller_in, caller_in, an_agent, names, who("agent_cap"), ends)
        one_ends = f"one of {caller} in this pool ends"
        job_cap(pool.agent_jobs, use.caller_jobs_in, caller_in, an_agent, names, who("agent_jobs"), one_ends)
        hour_cap(pool.agent_gpu_hours, use.day_caller_in, caller_in, an_agent, names, who("agent_gpu_hours"))
    ends = "work in this pool ends"
    card_cap("quota_pool", pool.cap, use.all, pool.name, everybody, in_pool, who("cap"), ends)
    job_cap(pool.jobs, use.jobs_in, pool.name, everybody, in_pool, who("jobs"), "one of them ends")
    hour_cap(pool.gpu_hours, use.day_pool, pool.name, everybody, in_pool, who("gpu_hours"))
    if pool.reserve > 0 and not ask.human:
        reserve = pool.reserve * UNITS_PER_CARD
        cap = use.cards[pool.name] if pool.cap is None else pool.cap * UNITS_PER_CARD
        kept = f"pool {where} keeps {cards_text(reserve)} for people, so agents together may have"
        ends = "work of agents in this pool ends"
        by = who("reserve")
        cards.append(Limit("reserve", max(0, cap - reserve), use.agents, pool.name, kept, in_pool, by, ends))
    return Limits(tuple(cards), tuple(jobs), tuple(hours))


Ends = Sequence[tuple[int, int, bool]]
"""Known ends of what is held in a pool: (when, units, held by a person), sorted."""


def room_at_ms(limits: Limits, wanted: int, ends: Ends, now_ms: int) -> int | None:
    """The earliest time at which the pool's cap and the agents' part of it leave room for `wanted` units.

    `now_ms` when they do already; None when known ends are not enough.
    """
    everybody, agents = (0 if spare is None else -spare for spare in spare_at(limits, wanted, (), now_ms))
    at_ms = now_ms
    for until_ms, units, human in ends:
        if everybody <= 0 and agents <= 0:
            break
        everybody -= units
        agents -= 0 if human else units
        at_ms = until_ms
    return at_ms if everybody <= 0 and agents <= 0 else None


def spare_at(limits: Limits, wanted: int, ends: Ends, at_ms: int) -> tuple[int | None, int | None]:
    """What is left beside `wanted` units once all of `ends` up to `at_ms` are over: for everybody, for agents. None = no cap.

    Below 0 where it is not enough.
    """
    freed = of_agents = 0
    for until_ms, units, human in ends:
        if until_ms > at_ms:
            break
        freed += units
        of_agents += 0 if human else units
    everybody = agents = None
    for limit in limits.cards:
        if limit.code == "quota_pool":
            everybody = limit.cap - limit.used + freed - wanted
        elif limit.code == "reserve":
            agents = limit.cap - limit.used + of_agents - wanted
    return everybody, agents
