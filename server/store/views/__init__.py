"""The read side of every door: rows and live observations as frozen answers, seen with one caller's eyes.

One module per noun; doors only know `Views`.
"""

from __future__ import annotations

from cotenant.server.store.views.base import Eyes
from cotenant.server.store.views.explain import ExplainViews
from cotenant.server.store.views.leases import LeaseViews
from cotenant.server.store.views.overview import OverviewViews


class Views(LeaseViews, ExplainViews, OverviewViews):  # the overview stands on those of quota, fleet and events
    """Every read of every door."""


__all__ = ["Eyes", "Views"]
