"""`cotenant replay` beside a real server, on a copy of its data directory, and after it was killed."""

import shutil
import subprocess
from pathlib import Path

from rig import Rig, until


def test_a_journal_is_replayed_beside_its_server_on_a_copy_and_after_a_kill(rig: Rig, tmp_path: Path) -> None:
    server = rig.server()
    client = server.client("recorded")
    client.until_job(client.call("submit_job", command=["true"], gpus=1)["job_id"], "succeeded")

    def beside() -> str:
        done = server.cli("replay", check=False)
        return done.stdout if done.returncode == 0 else ""

    said = until(beside, "a journal with all that was decided")
    assert "every byte the same" in said, said
    server.kill()
    files = sorted((server.data / "journal").iterdir())
    # what a kill in the middle of a write leaves; the frame's head says more than there is
    with files[-1].open("ab") as stream:
        stream.write((1000).to_bytes(4) + b"half a")
    copy = tmp_path / "copy"
    shutil.copytree(server.data / "journal", copy / "journal")
    for data in (server.data, copy):
        done = subprocess.run(
            [rig.cotenant, "replay", "--data", data], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0
        assert "every byte the same" in done.stdout
        assert "not written to its end" in done.stderr and files[-1].name in done.stderr
    server.start()
    client.close()
    client.until_job(client.call("submit_job", command=["true"], gpus=1)["job_id"], "succeeded")
    server.stop()
    assert len(list((server.data / "journal").iterdir())) == len(files) + 1
    assert "every byte the same" in server.cli("replay").stdout
