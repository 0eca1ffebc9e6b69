"""At the end of the suite: everything that any server of this run decided is decided again, byte for byte.

The mark `last` puts this test at the end. Every server writes a journal into its data directory, and pytest keeps those of a
session, so that nothing has to be gathered while the others run.
"""

from pathlib import Path

import pytest
from rig import Rig

from cotenant.server import journal, replaying


@pytest.mark.last
def test_all_that_was_decided_in_this_run_is_decided_alike_again(
    rig: Rig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # one of its own, so that there is something also where this test runs alone
    server = rig.server()
    client = server.client("recorded")
    client.until_job(client.call("submit_job", command=["true"], gpus=1)["job_id"], "succeeded")
    server.stop()
    places = sorted({path.parent.parent for path in tmp_path_factory.getbasetemp().rglob(f"{journal.FOLDER}/*.ticks")})
    version = journal.deciding_version()
    passes = decisions = 0
    wrong: list[str] = []
    for place in places:
        damages: list[str] = []
        found = replaying.compare(journal.all_ticks(place, damages), version)
        passes, decisions = passes + found.ticks, decisions + found.decisions
        wrong += [f"{_short(place)}: {damage}" for damage in damages]
        wrong += [f"{_short(place)}: decided by {name}" for name in found.other_versions]
        if found.differs_at_ms is not None:
            wrong.append(f"{_short(place)}: the pass at {found.differs_at_ms} {found.difference}")
    print(f"{passes} passes of {len(places)} servers with {decisions} decisions, decided again")
    assert wrong == []
    assert server.data in places and decisions > 0


def _short(place: Path) -> str:
    return "/".join(place.parts[-3:])
