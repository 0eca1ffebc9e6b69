"""The wheel alone, in an environment without the checkout: a server from it grants, runs a job, and survives a kill."""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

from rig import ROOT, Rig


def test_a_server_from_the_wheel_runs_a_job(make_rig: Callable[..., Rig], tmp_path: Path) -> None:
    out, home = tmp_path / "dist", tmp_path / "venv"
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = out.glob("*.whl")
    venv.create(home, symlinks=True)
    install = ["install", "-q", "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), *install], check=True)
    # What Cotenant depends on is lent by this environment; its editable install is not (a .pth of a .pth is not read).
    lib = next(home.glob("lib/python*/site-packages"))
    (lib / "lent.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    rig = make_rig(env={"PYTHONPATH": ""}, cotenant=home / "bin" / "cotenant")
    server = rig.server(gpus=1)
    client = server.client("agent")
    job = client.call("submit_job", command=rig.command("sleep 1", 3), gpus=1, request_id="one")
    client.until_job(job["job_id"], "running")
    server.kill()
    server.start()
    assert client.until_job(job["job_id"], "failed")["exit_code"] == 3
    assert len(rig.said("BEGIN", job["job_id"])) == 1
    lease = client.call("acquire_lease", gpus=1, request_id="two")
    assert lease["fence"] == 2
    where = subprocess.run(
        [home / "bin" / "python", "-c", "import cotenant.hostd as h; print(h.__file__)"],
        env={**rig.env}, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert where.stdout.startswith(str(lib))
    server.healthy()
