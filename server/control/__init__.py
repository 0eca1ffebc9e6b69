"""One use case per function, one transaction each. Every write of every door comes through here."""

from __future__ import annotations

from cotenant.server.control.auth import Auth
from cotenant.server.control.context import Changes, Context
from cotenant.server.control.foresight import Foresight
from cotenant.server.control.holds import Holds
from cotenant.server.control.hosts import Hosts
from cotenant.server.control.idling import Idling
from cotenant.server.control.jobs import Jobs
from cotenant.server.control.leases import Leases
from cotenant.server.control.logins import Logins
from cotenant.server.control.logs import Logs
from cotenant.server.control.operate import Operate
from cotenant.server.control.preempting import Preempting
from cotenant.server.control.rulebook import RuleBook
from cotenant.server.control.stopping import Confirmations
from cotenant.server.control.tokens import Tokens
from cotenant.server.control.waits import Waits
from cotenant.server.store.views import Views


class Control:
    """All use cases of one server, as the doors reach them."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.auth = Auth(context)
        self.views = Views(context, self.auth)
        self.holds = Holds(context)
        self.leases = Leases(context, self.views, self.holds)
        self.logs = Logs(context, self.auth)
        self.jobs = Jobs(context, self.views, self.leases, self.logs)
        self.tokens = Tokens(context, self.auth)
        self.logins = Logins(context, self.auth)
        self.confirmations = Confirmations(context)
        self.waits = Waits(context)
        self.foresight = Foresight(context, self.views)
        self.preempting = Preempting(context, self.jobs)
        self.idling = Idling(context, self.leases, self.preempting)
        self.hosts = Hosts(context, self.holds, self.jobs, self.preempting)
        self.rulebook = RuleBook(context)
        self.operate = Operate(
            context,
            self.views,
            self.leases,
            self.jobs,
            self.hosts,
            self.tokens,
            self.logins,
            self.preempting,
            self.rulebook,
        )

    @property
    def changes(self) -> Changes:
        return self.context.changes


__all__ = ["Control"]
