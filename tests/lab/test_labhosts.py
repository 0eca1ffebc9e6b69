"""The lab itself, proved with the real parts: OpenSSH sshd, asyncssh, nvidia-ml-py.  ~40 s on 2 cores, root."""

import asyncio
import json
import os
import pathlib
import subprocess
import time

import asyncssh
import labhosts
import pytest

pytestmark = [pytest.mark.lab, pytest.mark.slow]

PYHOST = "/usr/bin/python3"  # the interpreter of the hosts
ECHO = """
import asyncio, sys
async def h(r, w):
    while (l := await r.readline()):
        w.write(l.upper()); await w.drain()
    w.close()
async def main():
    s = await asyncio.start_unix_server(h, sys.argv[1]); await s.serve_forever()
asyncio.run(main())
"""


async def out(c, cmd, **kw):
    r = await c.run(cmd, check=True, **kw)
    return r.stdout.strip()


async def echo_daemon(c, path="/run/user/7001/echo.sock"):
    await c.run("cat > /tmp/echo.py", input=ECHO, check=True)
    await c.run("setsid %s -S -E /tmp/echo.py %s </dev/null >/dev/null 2>&1 &" % (PYHOST, path), check=True)
    while (await c.run("test -S " + path)).exit_status:
        await asyncio.sleep(0.02)
    return path


async def test_exec_sftp_and_forwards_on_every_host(hosts, ssh, tmp_path):
    async def one(h):
        c = await ssh(h)
        assert await out(c, "hostname; id -un; pwd") == "%s\ngpu\n/home/gpu" % h.name
        src = tmp_path / ("f" + h.name)
        src.write_bytes(os.urandom(3 << 20))
        async with c.start_sftp_client() as s:
            await s.put(str(src), "f")
            await s.get("f", str(src) + ".back")
        assert src.read_bytes() == src.with_name(src.name + ".back").read_bytes()
        assert pathlib.Path(h.home, "f").read_bytes() == src.read_bytes()  # seen from outside too
        r, w = await c.open_unix_connection(await echo_daemon(c))
        w.write(b"hi\n")
        assert await r.readline() == b"HI\n"
        await c.run("setsid %s -m http.server --bind 127.0.0.1 8099 -d /run/lab </dev/null >/dev/null 2>&1 &" % PYHOST)
        lis = await c.forward_local_port("127.0.0.1", 0, "127.0.0.1", 8099)
        for _ in range(100):
            r, w = await asyncio.open_connection("127.0.0.1", lis.get_port())
            w.write(b"GET /boot_id HTTP/1.0\r\n\r\n")
            body = await r.read()
            w.close()
            await w.wait_closed()
            if body:
                break
            await asyncio.sleep(0.05)
        assert b"200 OK" in body
        lis.close()
        await lis.wait_closed()

    await asyncio.gather(*[one(h) for h in hosts])


async def test_hosts_are_separate(hosts, ssh):
    seen = []
    for h in hosts:
        c = await ssh(h)
        await c.run("echo %s > ~/who; echo %s > /tmp/who" % (h.name, h.name))
    for h in hosts:
        c = await ssh(h)
        assert await out(c, "cat ~/who /tmp/who") == "%s\n%s" % (h.name, h.name)
        assert int(await out(c, "ls /proc | grep -c '^[0-9]'")) < 15  # own pid namespace
        seen.append(await out(c, "cat /proc/sys/kernel/random/boot_id"))
        assert (await c.run("cat /proc/1/environ")).exit_status  # gpu is not root
    assert len(set(seen)) == 3
    uu = [u for h in hosts for u in h.nvml.uuids()]
    assert len(uu) == len(set(uu)) == 12
    c = await ssh(hosts[0], username="root")
    assert await out(c, "id -u; echo $HOME") == "0\n/home/root"

    assert not os.path.exists("/home/gpu") and not os.path.exists("/run/lablib")


def pynvml_on(h, code):
    """Run code with nvidia-ml-py inside a host: found by the loader with no environment variable at all."""
    import pynvml

    dst = os.path.join(h.home, "pynvml.py")
    if not os.path.exists(dst):
        with open(pynvml.__file__) as f, open(dst, "w") as o:
            o.write(f.read())
    pre = "import sys, json; sys.path.insert(0, '/home/gpu'); import pynvml as N; N.nvmlInit()\nH = N.nvmlDeviceGetHandleByIndex\n"
    r = h.run(
        [
            "setpriv",
            "--reuid",
            "7001",
            "--clear-groups",
            "env",
            "-i",
            PYHOST,
            "-c",
            pre + "print(json.dumps(%s))" % code,
        ]
    )
    assert r.returncode == 0, r.stderr
    return json.loads(r.stdout)


async def test_gpus_and_a_job_that_uses_one(hosts, ssh):
    h = hosts[1]
    assert pynvml_on(h, "[N.nvmlDeviceGetUUID(H(i)) for i in range(N.nvmlDeviceGetCount())]") == h.nvml.uuids()
    procs = "[[p.pid for p in N.nvmlDeviceGetComputeRunningProcesses(H(i))] for i in range(4)]"

    c = await ssh(h)
    env = "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=%s "
    p = await c.create_process(env % "2" + "exec %s /run/lablib/fakecuda.py --mem 30G --util 70 --for 60" % PYHOST)
    assert (await p.stdout.readline()).strip() == "fakecuda: " + h.nvml.uuid(2)
    pids = await asyncio.to_thread(pynvml_on, h, procs)
    assert [len(x) for x in pids] == [0, 0, 1, 0]
    assert "fakecuda" in await out(c, "tr '\\0' ' ' < /proc/%d/cmdline" % pids[2][0])  # the pid as the host knows it
    assert await asyncio.to_thread(pynvml_on, h, "N.nvmlDeviceGetMemoryInfo(H(2), N.nvmlMemory_v2).used") == 30 << 30
    assert await asyncio.to_thread(pynvml_on, h, "N.nvmlDeviceGetUtilizationRates(H(2)).gpu") == 70
    r = await c.run(env % "2" + "%s /run/lablib/fakecuda.py --mem 60G" % PYHOST)
    assert r.exit_status == 1 and "out of memory" in r.stderr
    r = await c.run(env % h.nvml.uuid(3)[:12] + "%s /run/lablib/fakecuda.py --mem 60G" % PYHOST)
    assert r.exit_status == 0 and h.nvml.uuid(3) in r.stdout
    h.nvml.lose(2)
    r = await asyncio.wait_for(p.wait(), 5)
    assert r.exit_status == 1 and "lost" in r.stderr
    h.nvml.restore(2)
    assert await asyncio.to_thread(pynvml_on, h, procs) == [[], [], [], []]
    h.nvml.foreign(0, 31337, "4G")
    assert (await asyncio.to_thread(pynvml_on, h, procs))[0] == [31337]


async def test_cut_is_noticed_by_keepalive_and_heals(hosts, ssh):
    h = hosts[0]
    c = await ssh(h, keepalive_interval=0.5, keepalive_count_max=2)
    quiet = await ssh(h)
    h.cut()
    t = time.time()
    await asyncio.wait_for(c.wait_closed(), 5)
    assert 0.9 < time.time() - t < 2.5
    assert not quiet.is_closed()  # no keepalive: knows nothing
    h.restore()
    assert await asyncio.wait_for(out(quiet, "echo ok"), 10) == "ok"  # and survives the gap
    assert await out(await ssh(h), "hostname") == h.name


async def test_blackhole_is_half_open(hosts, ssh):
    h = hosts[0]
    c = await ssh(h, keepalive_interval=0.5, keepalive_count_max=2)
    r, w = await c.open_unix_connection(await echo_daemon(c))
    h.blackhole()
    assert "LOWER_UP" in h.run("ip link show eth0").stdout  # the host itself sees nothing wrong
    w.write(b"x\n")
    await w.drain()  # a write is no proof of anything
    with pytest.raises(asyncssh.ConnectionLost):
        await asyncio.wait_for(r.readline(), 5)
    with pytest.raises((OSError, asyncio.TimeoutError)):
        await ssh(h, connect_timeout=0.5)
    h.restore()
    assert await out(await ssh(h), "hostname") == h.name


async def test_wire_adds_latency_and_loss(hosts, ssh):
    h = hosts[2]
    c = await ssh(h)
    r, w = await c.open_unix_connection(await echo_daemon(c))

    async def rtt(n):
        ts = []
        for _ in range(n):
            t = time.perf_counter()
            w.write(b"p\n")
            await r.readline()
            ts.append(time.perf_counter() - t)
        return sorted(ts)

    assert (await rtt(20))[10] < 0.01
    h.wire(delay_ms=20)  # while the connection is open
    assert 0.040 <= (await rtt(20))[10] < 0.060
    h.wire(delay_ms=5)  # changed on the fly
    assert 0.010 <= (await rtt(20))[10] < 0.030
    h.wire(loss=20)
    assert (await rtt(60))[-1] > 0.1  # retransmissions
    h.wire(loss_in=100)  # asymmetric: nothing reaches the host
    w.write(b"p\n")
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(r.readline(), 0.7)
    h.unwire()
    assert await asyncio.wait_for(r.readline(), 10) == b"P\n"
    assert (await rtt(20))[10] < 0.01


async def test_power_loss_sends_nothing_and_boots_clean(hosts, ssh):
    h = hosts[1]
    c = await ssh(h)
    await c.run("echo keep > ~/keep; echo gone > /tmp/gone; setsid sleep 1000 </dev/null >/dev/null 2>&1 &")
    boot = await out(c, "cat /proc/sys/kernel/random/boot_id")
    t = time.time()
    h.power_off()
    assert time.time() - t < 2 and not h.up
    await asyncio.sleep(0.5)
    assert not c.is_closed()  # neither FIN nor RST got out
    h.power_on()
    h.wait_ssh()
    t = time.time()
    with pytest.raises((asyncssh.Error, OSError)):  # the rebooted kernel answers RST
        await asyncio.wait_for(c.run("true"), 10)
    d = await ssh(h)
    assert await out(d, "cat ~/keep; ls /tmp") == "keep"
    assert (await d.run("pgrep sleep")).stdout == ""
    assert await out(d, "cat /proc/sys/kernel/random/boot_id") != boot


async def test_orderly_reboot_closes_connections(hosts, ssh):
    h = hosts[1]
    c = await ssh(h)
    await asyncio.to_thread(h.reboot)
    await asyncio.wait_for(c.wait_closed(), 5)
    assert await out(await ssh(h), "hostname") == h.name


async def test_sshd_restart_keeps_sessions(hosts, ssh):
    h = hosts[0]
    c = await ssh(h)
    p = await c.create_process("read x; echo got $x")
    h.stop_sshd()
    with pytest.raises(OSError):
        await ssh(h)
    h.start_sshd()
    p.stdin.write("it\n")
    assert (await p.stdout.readline()) == "got it\n"
    assert await out(await ssh(h), "hostname") == h.name


async def test_jump_host(hosts, ssh, lab):
    hosts[1].hide()
    with pytest.raises((OSError, asyncio.TimeoutError)):
        await ssh(hosts[1], connect_timeout=0.5)
    j = await ssh(hosts[0])
    c = await ssh(hosts[1], tunnel=j)
    assert (await out(c, "hostname; echo $SSH_CLIENT")).startswith("h2\n" + hosts[0].ip)
    cfg = os.path.join(lab.dir, "jump_config")
    with open(cfg, "w") as f:
        f.write("Include %s\nHost h2\n  ProxyJump h1\n" % lab.ssh_config)
    async with asyncssh.connect("h2", config=[cfg]) as c:
        assert await out(c, "hostname") == "h2"
    r = await asyncio.to_thread(
        subprocess.run,
        ["ssh", "-F", lab.ssh_config, "-o", "ConnectTimeout=10", "h1", "hostname"],
        capture_output=True,
        text=True,
    )
    assert r.stdout == "h1\n"  # the OpenSSH client reads the same file


def test_up_is_idempotent_and_down_is_exact(lab_able, tmp_path):
    t = time.time()
    lab = labhosts.Lab(tmp_path / "l2").up(3, gpus=2)
    first = time.time() - t
    assert first < 8
    pids = [h.rec for h in lab.hosts]
    lab["h1"].cut()
    lab["h3"].power_off()
    t = time.time()
    again = labhosts.Lab(tmp_path / "l2").up(3)
    assert time.time() - t < 5
    assert [h.rec for h in again.hosts][:2] == pids[:2] and again["h3"].rec != pids[2]
    bystander = subprocess.Popen(["sleep", "60"])
    with again._locked():  # a stale record: same pid, another process
        again.meta["hosts"]["h2"]["wire"] = {"pid": bystander.pid, "start": 1}
        again._store()
    again.down()
    again.down()
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
    assert not [n for n in os.listdir("/run/netns") if n.startswith(lab.id)] if os.path.isdir("/run/netns") else True
    assert not [n for n in os.listdir("/sys/class/net") if n.startswith(lab.id)]
    assert not os.path.isdir(os.path.join(labhosts.CG2 or "/none", lab.id))
    for r in pids:
        assert labhosts.start_ticks(r["pid"]) != r["start"]
