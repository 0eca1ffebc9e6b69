"""labhosts - N throw-away "hosts" on one Linux machine, for tests.  Root, iproute2 and openssh-server needed.
Standard library only.  SPDX: MIT.

A host = network + pid + mount + uts + ipc + cgroup namespaces, its own sshd (keys only, no PAM), its own
/home /tmp /run /etc/ssh /etc/passwd, hostname, boot_id and fake-NVML state.  Users: "gpu" (uid 7001) and
"root" (home /home/root).  Nothing of the machine outside DIR and its own network devices is changed.

    lab = Lab("/some/dir").up(3, gpus=4)      # idempotent: starts what is missing
    h = lab["h1"]; h.ip; h.user; h.nvml       # h.nvml: fakenvml.FakeNvml of that host
    h.cut(); h.restore()                      # cable out / in (carrier lost)
    h.blackhole(); h.restore()                # packets vanish both ways, carrier stays: half-open TCP
    h.hide(); h.restore()                     # reachable from the other hosts only (jump host tests)
    h.wire(delay_ms=50, jitter_ms=5, loss=2); h.unwire()     # software netem (no kernel module needed)
    h.power_off(); h.power_on(); h.reboot()   # power loss: no FIN, no RST, all processes gone at once
    h.stop_sshd(); h.start_sshd(); h.restart_sshd()
    h.run("ps ax"), h.popen([...])            # inside the host without ssh, as root
    lab.down()
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import heapq
import json
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
UID = 7001
NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWPID, NEWNET = 0x20000, 0x02000000, 0x04000000, 0x08000000, 0x20000000, 0x40000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV = 1, 32, 4096, 16384, 1 << 18, 2, 4
LOCK = "/run/lock/labhosts.lock" if os.path.isdir("/run/lock") else "/tmp/labhosts.lock"
CG2 = next((p for p in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup") if os.path.exists(p + "/cgroup.controllers")), None)
libc = ctypes.CDLL(None, use_errno=True)


def _sys(name, *a):
    if getattr(libc, name)(*a) != 0:
        e = ctypes.get_errno()
        raise OSError(e, "%s%r: %s" % (name, a, os.strerror(e)))


def mount(src, dst, fs=None, flags=0, data=None):
    b = lambda s: None if s is None else os.fspath(s).encode()
    _sys("mount", b(src), b(dst), b(fs), ctypes.c_ulong(flags), b(data))


def start_ticks(pid):
    """Start time of a live process in clock ticks; None when gone or a zombie."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as f:
            s = f.read().rsplit(b")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return None if s[0] in (b"Z", b"X") else int(s[19])


def ip(*lines, ns=None, check=True):
    r = subprocess.run(
        ["ip"] + (["-n", ns] if ns else []) + ["-force", "-batch", "-"]
        if not check
        else ["ip"] + (["-n", ns] if ns else []) + ["-batch", "-"],
        input="\n".join(lines) + "\n",
        text=True,
        capture_output=True,
        check=False,  # the error below names the lines
    )
    if check and r.returncode:
        raise RuntimeError("ip -batch: %s\n%s" % (r.stderr.strip(), "\n".join(lines)))
    return r


def _sysctl(path, val):
    try:
        with open("/proc/sys/" + path, "w") as f:
            f.write(str(val))
    except OSError:
        pass


def _alive(rec):
    return bool(rec) and start_ticks(rec["pid"]) == rec["start"]


def _kill(rec, sig=signal.SIGKILL, wait=5.0):
    """Signal exactly the process that was started (pid + start time), wait for its end."""
    if not _alive(rec):
        return
    try:
        fd = os.pidfd_open(rec["pid"])
    except ProcessLookupError:
        return
    try:
        if _alive(rec):  # the pidfd now pins the identity that was just checked
            signal.pidfd_send_signal(fd, sig)
            if wait:
                select.select([fd], [], [], wait)
    except ProcessLookupError:
        pass
    finally:
        os.close(fd)
    with contextlib.suppress(OSError):
        os.waitpid(rec["pid"], os.WNOHANG)  # reap when it is our own child


def _spawn(argv, log, env=None):
    """Detached child; returns {pid, start}."""
    with open(log, "ab") as lf:
        p = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=lf, stderr=lf, start_new_session=True, cwd="/", env=env
        )
    t = start_ticks(p.pid)
    _spawn.keep.append(p)  # no "still running" warning; polled in _kill
    return {"pid": p.pid, "start": t}


_spawn.keep = []


# ------------------------------------------------------------------------------------------------ hosts
class Host:
    def __init__(self, lab, i):
        self.lab, self.i, self.name = lab, i, "h%d" % i
        self.dir = os.path.join(lab.dir, self.name)
        self.ns, self.dev, self.tap = "%s-%s" % (lab.id, self.name), "%sh%d" % (lab.id, i), "%sw%d" % (lab.id, i)
        self.user, self.port = "gpu", 22

    ip = property(lambda s: "%s.%d" % (s.lab.net, 10 + s.i))

    @property
    def rec(self):
        r = self.lab.meta["hosts"].get(self.name, {}).get("init")
        if not _alive(r):  # an interrupted up(): the starter wrote itself down
            try:
                with open(os.path.join(self.dir, "init.pid")) as f:
                    q = json.load(f)
                r = q if _alive(q) else r
            except (OSError, ValueError):
                pass
        return r

    wrec = property(lambda s: s.lab.meta["hosts"].get(s.name, {}).get("wire"))
    pid = property(lambda s: s._initpid())
    up = property(lambda s: _alive(s.rec))

    @property
    def nvml(self):
        import fakenvml

        return fakenvml.FakeNvml(os.path.join(self.dir, "lab", "nvml.state"))

    @property
    def home(self):
        """The gpu user's home, seen from outside (also while the host is off)."""
        return os.path.join(self.dir, "home", "gpu")

    def _initpid(self):
        """Outer pid of the host's pid 1 (the child of the recorded starter)."""
        p = self.rec["pid"]
        for _ in range(200):  # a just started host has not forked yet
            with open("/proc/%d/task/%d/children" % (p, p)) as f:
                k = f.read().split()
            if k:
                return int(k[0])
            time.sleep(0.005)
        raise ProcessLookupError("%s has no pid 1" % self.name)

    def _save(self, **kw):
        with self.lab._locked():
            d = self.lab.meta["hosts"].setdefault(self.name, {})
            d.update(kw)
            self.lab._store()

    # ---- network
    def cut(self):
        ip("link set %s down" % self.dev)

    def blackhole(self):
        subprocess.run(
            ["bridge", "link", "set", "dev", self.tap if _alive(self.wrec) else self.dev, "state", "0"], check=True
        )

    def hide(self):
        """This machine cannot reach the host any more, the other hosts can: only a jump host helps."""
        ip("neigh replace %s lladdr 02:00:00:00:00:99 dev %s nud permanent" % (self.ip, self.lab.bridge))

    def restore(self):
        ip("neigh del %s dev %s" % (self.ip, self.lab.bridge), check=False)
        ip("link set %s up" % self.dev)
        dev = self.tap if _alive(self.wrec) else self.dev
        subprocess.run(["bridge", "link", "set", "dev", dev, "state", "3"], check=True)
        # an ARP entry that is just failing would give the next connect() EHOSTUNREACH
        ip("neigh flush dev %s to %s" % (self.lab.bridge, self.ip), check=False)
        ip("neigh flush dev eth0", ns=self.ns, check=False)

    def wire(self, delay_ms=0, jitter_ms=0, loss=0, loss_in=None, loss_out=None, rate_mbit=0):
        """Put a software wire between host and bridge: delay and loss PER DIRECTION (in = towards the host)."""
        cfg = os.path.join(self.dir, "wire.json")
        tmp = cfg + ".tmp"
        with open(tmp, "w") as f:
            json.dump(
                {
                    "delay": delay_ms / 1000,
                    "jitter": jitter_ms / 1000,
                    "rate": rate_mbit * 125000,
                    "loss_in": loss if loss_in is None else loss_in,
                    "loss_out": loss if loss_out is None else loss_out,
                },
                f,
            )
        os.replace(tmp, cfg)
        if _alive(self.wrec):
            os.kill(self.wrec["pid"], signal.SIGHUP)
            return
        ip("tuntap add dev %s mode tap vnet_hdr" % self.tap)
        _sysctl("net/ipv6/conf/%s/disable_ipv6" % self.tap, 1)
        rec = _spawn(
            [self.lab.python, "-I", "-S", os.path.join(HERE, "labhosts.py"), "--wire", self.dev, self.tap, cfg],
            os.path.join(self.dir, "log", "wire.log"),
        )
        self._save(wire=rec)
        end = time.time() + 5
        while not os.path.exists(cfg + ".ready"):
            if time.time() > end or not _alive(rec):
                raise RuntimeError("wire did not start, see %s" % os.path.join(self.dir, "log", "wire.log"))
            time.sleep(0.005)
        os.unlink(cfg + ".ready")
        ip("link set %s nomaster" % self.dev, "link set %s master %s up" % (self.tap, self.lab.bridge))

    def unwire(self):
        rec = self.wrec
        if rec:
            _kill(rec)
            ip("link del %s" % self.tap, check=False)
            ip("link set %s master %s up" % (self.dev, self.lab.bridge), check=False)
            self._save(wire=None)

    # ---- power
    def power_on(self):
        if self.up:
            return
        self._clear_net()
        mac = "02:dd:%s:%s:00:%02x" % (self.lab.id[2:4], self.lab.id[4:6], self.i)
        ip(
            "netns add %s" % self.ns,
            "link add %s type veth peer name eth0 address %s netns %s" % (self.dev, mac, self.ns),
        )
        _sysctl("net/ipv6/conf/%s/disable_ipv6" % self.dev, 1)
        ip("link set %s master %s up" % (self.dev, self.lab.bridge))
        cfg = {
            "dir": self.dir,
            "lib": os.path.join(self.lab.dir, "lib"),
            "ns": self.ns,
            "name": self.name,
            "ip": self.ip,
            "share": self.lab.meta.get("share", []),
            "hosts": {"h%d" % i: "%s.%d" % (self.lab.net, 10 + i) for i in range(1, self.lab.meta["n"] + 1)},
            "cgroup": self.cgroup,
            "private_tmp": self.lab.meta.get("private_tmp", True),
            "owner": self.lab.meta.get("owner"),
        }
        rec = _spawn(
            [self.lab.python, "-I", "-S", os.path.join(HERE, "labhosts.py"), "--init", json.dumps(cfg)],
            os.path.join(self.dir, "log", "init.log"),
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
        )
        self._save(init=rec)

    @property
    def cgroup(self):
        return os.path.join(CG2, self.lab.id, self.name) if CG2 else None

    def wait_ssh(self, timeout=10):
        end = time.time() + timeout
        while True:
            try:
                while not self._listening() and time.time() < end and (not self.rec or self.up):
                    time.sleep(0.004)  # a SYN sent too early would cost a 1 s retry
                with socket.create_connection((self.ip, self.port), 1) as s:
                    s.settimeout(2)
                    if s.recv(4) == b"SSH-":
                        return self
            except OSError:
                pass
            if time.time() > end or (self.rec and not self.up):
                raise RuntimeError("%s: no sshd; see %s" % (self.name, os.path.join(self.dir, "log")))
            time.sleep(0.005)

    def _listening(self):
        try:
            with open("/proc/%d/net/tcp" % self.pid) as f:
                return any(l.split()[1].endswith(":0016") and l.split()[3] == "0A" for l in f.read().splitlines()[1:])
        except (OSError, IndexError, TypeError):
            return False

    def power_off(self):
        """Power loss: the cable first, so that no FIN or RST gets out, then every process at once."""
        self.unwire()
        ip("link set %s down" % self.dev, check=False)
        rec = self.rec
        if _alive(rec):
            with contextlib.suppress(OSError, ValueError):  # not forked yet, or gone meanwhile
                # pid 1 of the namespace: the kernel kills the rest
                _kill({"pid": self.pid, "start": start_ticks(self.pid)})
            _kill(rec)
        self._clear_net()
        self._rm_cgroup()
        self._save(init=None)

    def _clear_net(self):
        ip("link del %s" % self.dev, "link del %s" % self.tap, check=False)
        if os.path.exists("/run/netns/" + self.ns):
            ip("netns del %s" % self.ns, check=False)

    def _rm_cgroup(self):
        if not self.cgroup or not os.path.isdir(self.cgroup):
            return
        for _ in range(200):  # emptied asynchronously
            try:
                for d, _s, _f in os.walk(self.cgroup, topdown=False):
                    os.rmdir(d)
                return
            except OSError as e:
                if e.errno not in (errno.EBUSY, errno.ENOENT):
                    return
                time.sleep(0.01)

    def reboot(self, wait=True):
        """Orderly: TERM to all, then as power_off + power_on (a new boot_id, /tmp and /run empty)."""
        if self.up:
            os.kill(self.pid, signal.SIGTERM)
            end = time.time() + 3
            while self.up and time.time() < end:
                time.sleep(0.01)
        self.power_off()
        self.power_on()
        return self.wait_ssh() if wait else self

    # ---- sshd
    def stop_sshd(self):
        """The listener only; open sessions live on, as with systemctl stop ssh."""
        os.kill(self.pid, signal.SIGUSR1)
        self._wait_listener(False)

    def start_sshd(self):
        os.kill(self.pid, signal.SIGUSR2)
        self.wait_ssh()

    def restart_sshd(self):
        self.stop_sshd()
        self.start_sshd()

    def _wait_listener(self, want, timeout=5):
        end = time.time() + timeout
        while time.time() < end:
            try:
                socket.create_connection((self.ip, self.port), 1).close()
                got = True
            except OSError:
                got = False
            if got == want:
                return
            time.sleep(0.01)
        raise RuntimeError("sshd listener is not %s" % want)

    # ---- inside, without ssh
    def _enter(self, argv):
        return ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "-C", "--"] + (
            ["sh", "-c", argv] if isinstance(argv, str) else list(argv)
        )

    def popen(self, argv, **kw):
        return subprocess.Popen(self._enter(argv), **kw)

    def run(self, argv, **kw):
        kw.setdefault("capture_output", True)
        kw.setdefault("text", True)
        kw.setdefault("timeout", 30)
        return subprocess.run(self._enter(argv), check=False, **kw)


class Lab:
    def __init__(self, dir):
        self.dir = os.path.abspath(os.fspath(dir))
        self.id = "lb" + hashlib.sha1(self.dir.encode()).hexdigest()[:4]
        self.bridge = self.id + "br"
        self.python = os.path.realpath(sys.executable)
        self.meta = {"n": 0, "hosts": {}}
        self._load()

    net = property(lambda s: "10.77.%d" % s.meta["x"])
    key = property(lambda s: os.path.join(s.dir, "key"))
    known_hosts = property(lambda s: os.path.join(s.dir, "known_hosts"))
    ssh_config = property(lambda s: os.path.join(s.dir, "ssh_config"))
    hosts = property(lambda s: [Host(s, i) for i in range(1, s.meta["n"] + 1)])

    def __getitem__(self, name):
        return Host(self, int(str(name).lstrip("h")))

    def ssh_kw(self, host, **kw):
        """Arguments for asyncssh.connect(): nothing of the machine's own ssh setup is read."""
        return {
            "host": host.ip,
            "username": host.user,
            "client_keys": [self.key],
            "known_hosts": self.known_hosts,
            "agent_path": None,
            "config": [],
            "connect_timeout": 10,
            **kw,
        }

    def _load(self):
        try:
            with open(os.path.join(self.dir, "lab.json")) as f:
                self.meta = json.load(f)
        except FileNotFoundError:
            pass

    def _store(self):
        tmp = os.path.join(self.dir, "lab.json.tmp")
        with open(tmp, "w") as f:
            json.dump(self.meta, f, indent=1)
        os.replace(tmp, os.path.join(self.dir, "lab.json"))

    def _locked(self):
        class L:
            def __enter__(s):
                s.f = open(LOCK, "w")
                fcntl.flock(s.f, fcntl.LOCK_EX)

            def __exit__(s, *a):
                s.f.close()

        return L()

    def up(self, n, gpus=4, share=(), private_tmp=True, owner=None):
        """owner: a pid; when that process ends, however it ends, the hosts end too."""
        if os.geteuid():
            raise PermissionError("labhosts needs root")
        for tool in ("ip", "bridge", "ssh-keygen", "nsenter"):
            if not shutil.which(tool):
                raise RuntimeError("missing: " + tool)
        if not os.path.exists("/usr/sbin/sshd"):
            raise RuntimeError("missing: /usr/sbin/sshd (Debian: apt-get install openssh-server)")
        os.makedirs(self.dir, exist_ok=True)
        import fakenvml

        fakenvml.build(os.path.join(self.dir, "lib"))
        shutil.copy(os.path.join(HERE, "fakecuda.py"), os.path.join(self.dir, "lib"))  # /run/lablib in the hosts
        if not os.path.exists(self.key):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", self.key], check=True)
        with self._locked():
            self._load()
            self.meta["n"] = max(n, self.meta["n"])
            self.meta["share"] = sorted(set(self.meta.get("share", [])) | {os.path.abspath(s) for s in share})
            self.meta["private_tmp"] = private_tmp
            self.meta["owner"] = owner
            if not os.path.isdir("/sys/class/net/" + self.bridge):
                used = {
                    l.split()[3].rsplit(".", 1)[0]
                    for l in subprocess.run(
                        ["ip", "-o", "-4", "addr"], capture_output=True, text=True, check=False
                    ).stdout.splitlines()
                }
                x0 = int(self.id[2:], 16) % 256
                self.meta["x"] = next(
                    x for x in [self.meta.get("x", x0), *list(range(256))] if "10.77.%d" % x not in used
                )
                ip("link add %s type bridge forward_delay 0 stp_state 0" % self.bridge)
                _sysctl("net/ipv6/conf/%s/disable_ipv6" % self.bridge, 1)
                ip("addr add %s.1/24 dev %s" % (self.net, self.bridge), "link set %s up" % self.bridge)
            self._store()
        for h in self.hosts:
            self._prepare(h, gpus)
        self._client_files()
        self._ldcache()
        for h in self.hosts:
            if h.up:
                h.unwire()
                h.restore()  # a test that died may have left the cable out
            else:
                h.power_on()
        for h in self.hosts:
            h.wait_ssh()
        return self

    def heal(self):
        """Everything as after up(): power, sshd, cables, wires, GPU faults, foreign processes, claims."""
        for h in self.hosts:
            if h.up:
                h.unwire()
                h.restore()
                if not h._listening():
                    os.kill(h.pid, signal.SIGUSR2)
            else:
                h.power_on()
            n = len([u for u in h.nvml.uuids() if u.startswith("GPU-")])
            shutil.rmtree(h.nvml.path + ".procs", ignore_errors=True)
            os.makedirs(h.nvml.path + ".procs")
            os.chmod(h.nvml.path + ".procs", 0o1777)
            h.nvml.create(gpus=n, host="%s/%s" % (self.id, h.name))
        for h in self.hosts:
            h.wait_ssh()

    def _prepare(self, h, gpus):
        d = lambda *p: os.path.join(h.dir, *p)
        for p in ("home/gpu/.ssh", "home/root/.ssh", "tmp", "etc/ssh", "lab", "log"):
            os.makedirs(d(p), exist_ok=True)
        os.chmod(d("tmp"), 0o1777)
        for u, uid in (("gpu", UID), ("root", 0)):
            shutil.copy(self.key + ".pub", d("home", u, ".ssh/authorized_keys"))
            for p, m in (("", 0o755), (".ssh", 0o700), (".ssh/authorized_keys", 0o600)):
                os.chmod(d("home", u, p), m)
                os.chown(d("home", u, p), uid, uid)
        if not os.path.exists(d("etc/ssh/ssh_host_ed25519_key")):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", h.name, "-f", d("etc/ssh/ssh_host_ed25519_key")],
                check=True,
            )
        os.makedirs(d("lab/nvml.state.procs"), exist_ok=True)
        os.chmod(d("lab/nvml.state.procs"), 0o1777)  # jobs of any user may claim a GPU
        if not os.path.exists(d("lab/nvml.state")):
            h.nvml.create(gpus=gpus, host="%s/%s" % (self.id, h.name))
        files = {
            "etc/passwd": "root:x:0:0:root:/home/root:/bin/bash\ngpu:x:%d:%d:gpu:/home/gpu:/bin/bash\n"
            "sshd:x:103:65534::/run/sshd:/usr/sbin/nologin\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
            % (UID, UID),
            "etc/group": "root:x:0:\ntty:x:5:\ngpu:x:%d:\nnogroup:x:65534:\n" % UID,
            "etc/shadow": "root:*:19000:0:99999:7:::\ngpu:*:19000:0:99999:7:::\nsshd:!:19000::::::\n",
            "etc/hostname": h.name + "\n",
            "etc/hosts": "127.0.0.1 localhost\n"
            + "".join("%s.%d h%d\n" % (self.net, 10 + i, i) for i in range(1, self.meta["n"] + 1)),
            "etc/ssh/sshd_config": "Port 22\nListenAddress %s\nHostKey /etc/ssh/ssh_host_ed25519_key\nPidFile none\nUsePAM no\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n"
            "AllowTcpForwarding yes\nAllowStreamLocalForwarding yes\nX11Forwarding no\nPrintMotd no\nUseDNS no\n"
            "LogLevel VERBOSE\nSubsystem sftp internal-sftp\nInclude /etc/ssh/extra.conf\n" % h.ip,
        }
        for name, text in files.items():
            with open(d(name), "w") as f:
                f.write(text)
        open(d("etc/ssh/extra.conf"), "a").close()

    def _ldcache(self):
        """A loader cache that also lists the fake library, made in a private mount namespace."""
        lib = os.path.join(self.dir, "lib")
        out = os.path.join(lib, "ld.so.cache")
        if os.path.exists(out) and os.stat(out).st_mtime > os.stat("/etc/ld.so.cache").st_mtime:
            return
        with open(os.path.join(lib, "ld.so.conf"), "w") as f:
            f.write("/run/lablib\ninclude /etc/ld.so.conf\n")
        sh = (
            'mount -t tmpfs none /run && mkdir /run/lablib && mount --bind "$1" /run/lablib && cd /run/lablib && '
            "/sbin/ldconfig -X -C ./ld.so.cache.new -f ./ld.so.conf 2>/dev/null && mv ld.so.cache.new ld.so.cache"
        )
        subprocess.run(["unshare", "-m", "sh", "-c", sh, "sh", lib], check=True)

    def _client_files(self):
        kh, cf = (
            [],
            [
                "Host *",
                "  IdentityFile %s" % self.key,
                "  IdentitiesOnly yes",
                "  UserKnownHostsFile %s" % self.known_hosts,
                "  GlobalKnownHostsFile /dev/null",
                "  StrictHostKeyChecking yes",
                "  ForwardAgent no",
                "  BatchMode yes",
                "  User gpu",
            ],
        )
        for h in self.hosts:
            with open(os.path.join(h.dir, "etc/ssh/ssh_host_ed25519_key.pub")) as f:
                kh.append("%s,%s %s" % (h.ip, h.name, " ".join(f.read().split()[:2])))
            cf += ["Host %s" % h.name, "  HostName %s" % h.ip, "  HostKeyAlias %s" % h.name]
        for path, lines in ((self.known_hosts, kh), (self.ssh_config, cf)):
            with open(path, "w") as f:
                f.write("\n".join(lines) + "\n")

    def down(self, purge=False):
        self._load()
        for h in self.hosts:
            h.power_off()
        ip("link del %s" % self.bridge, check=False)
        if CG2 and os.path.isdir(os.path.join(CG2, self.id)):
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(CG2, self.id))
        for p in ["lab.json"]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.dir, p))
        self.meta = {"n": 0, "hosts": {}}
        if purge:
            shutil.rmtree(self.dir, ignore_errors=True)


# ------------------------------------------------------------------------- inside a host: its pid 1
def init_main(c):
    d = c["dir"]
    with open(d + "/init.pid.tmp", "w") as f:
        json.dump({"pid": os.getpid(), "start": start_ticks(os.getpid())}, f)
    os.rename(d + "/init.pid.tmp", d + "/init.pid")
    owner = None
    if c.get("owner"):
        try:
            owner = os.pidfd_open(c["owner"])
        except OSError:
            return
    fd = os.open("/run/netns/" + c["ns"], os.O_RDONLY)
    _sys("setns", fd, NEWNET)
    os.close(fd)
    if c["cgroup"]:
        try:
            os.makedirs(c["cgroup"], exist_ok=True)
            with open(c["cgroup"] + "/cgroup.procs", "w") as f:
                f.write("0")
        except OSError as e:
            print("no cgroup:", e, flush=True)
            c["cgroup"] = None
    _sys("unshare", NEWNS | NEWUTS | NEWIPC | NEWPID | (NEWCGROUP if c["cgroup"] else 0))
    pid = os.fork()
    if pid:  # the starter: ends with pid 1, takes it along, and ends with the owner
        signal.signal(signal.SIGTERM, lambda *a: os.kill(pid, signal.SIGKILL))
        child = os.pidfd_open(pid)
        select.select([child] + ([owner] if owner else []), [], [])
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os._exit(0)
    if owner:
        os.close(owner)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: a killed starter is a power cut too
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    _sys("sethostname", c["name"].encode(), len(c["name"]))
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV)
    mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV)
    if c["cgroup"]:
        mount("cgroup2", "/sys/fs/cgroup", "cgroup2")
    mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV)
    shares = []  # taken before /tmp or /home cover them
    for s in c["share"]:
        shares.append((s, os.open(s, os.O_PATH)))
    dfd, lfd = os.open(d, os.O_PATH), os.open(c["lib"], os.O_PATH)
    at = lambda p: "/proc/self/fd/%d/%s" % (dfd, p)
    with open(os.path.join(d, "lab", "boot_id"), "w") as f:
        h = os.urandom(16).hex()
        f.write("-".join((h[:8], h[8:12], h[12:16], h[16:20], h[20:])) + "\n")
    for f in ("passwd", "group", "shadow", "hostname", "hosts"):
        if os.path.exists("/etc/" + f):
            mount(at("etc/" + f), "/etc/" + f, None, MS_BIND)
    if not os.path.isdir("/etc/ssh"):
        raise RuntimeError("/etc/ssh missing: openssh-server not installed")
    mount(at("etc/ssh"), "/etc/ssh", None, MS_BIND)
    mount(at("home"), "/home", None, MS_BIND)
    mount("tmpfs", "/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    for p, uid, m in (
        ("/run/sshd", 0, 0o755),
        ("/run/lab", 0, 0o755),
        ("/run/lablib", 0, 0o755),
        ("/run/user", 0, 0o755),
        ("/run/user/%d" % UID, UID, 0o700),
        ("/run/fake-nvml", 0, 0o755),
        ("/run/lock", 0, 0o1777),
    ):
        os.mkdir(p)
        os.chown(p, uid, uid)
        os.chmod(p, m)
    mount(at("lab"), "/run/lab", None, MS_BIND)
    mount("/proc/self/fd/%d" % lfd, "/run/lablib", None, MS_BIND)
    os.symlink("/run/lab/nvml.state", "/run/fake-nvml/state")  # the library's default path
    os.symlink("/run/lab/nvml.state.procs", "/run/fake-nvml/state.procs")
    mount("/run/lab/boot_id", "/proc/sys/kernel/random/boot_id", None, MS_BIND)
    if c["private_tmp"]:
        for e in os.listdir(at("tmp")):  # empty after a boot
            p = at("tmp/" + e)
            shutil.rmtree(p, ignore_errors=True) if os.path.isdir(p) and not os.path.islink(p) else os.unlink(p)
        mount(at("tmp"), "/tmp", None, MS_BIND)
    for s, f in shares:
        try:
            if os.path.isdir("/proc/self/fd/%d" % f):
                os.makedirs(s, exist_ok=True)
            elif not os.path.exists(s):
                os.makedirs(os.path.dirname(s), exist_ok=True)
                open(s, "w").close()
            mount("/proc/self/fd/%d" % f, s, None, MS_BIND)
            mount(None, s, None, MS_BIND | MS_REMOUNT | MS_RDONLY)
        except OSError as e:
            print("share", s, e, flush=True)
        os.close(f)
    os.close(dfd)
    os.close(lfd)
    os.chdir("/")
    ip("link set lo up", "link set eth0 up", "addr add %s/24 dev eth0" % c["ip"])
    if os.path.exists("/run/lablib/ld.so.cache"):  # dlopen("libnvidia-ml.so.1") finds it with no environment variable
        mount("/run/lablib/ld.so.cache", "/etc/ld.so.cache", None, MS_BIND)

    st = {"sshd": None, "want": True}

    def start():
        if not st["sshd"]:
            st["sshd"] = subprocess.Popen(
                ["/usr/sbin/sshd", "-D", "-e", "-f", "/etc/ssh/sshd_config"],
                stdin=subprocess.DEVNULL,
                env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
            ).pid

    ev = []
    for s in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(s, lambda n, f: ev.append(n))
    r, w = os.pipe()
    os.set_blocking(w, False)
    signal.set_wakeup_fd(w)
    start()
    while True:
        select.select([r], [], [], None)
        os.read(r, 512)
        while ev:
            n = ev.pop(0)
            if n == signal.SIGUSR1 and st["sshd"]:
                st["want"] = False
                os.kill(st["sshd"], signal.SIGTERM)
            elif n == signal.SIGUSR2:
                st["want"] = True
                start()
            elif n == signal.SIGTERM:  # orderly shutdown
                os.kill(-1, signal.SIGTERM)
                end = time.time() + 1.5
                while time.time() < end:
                    try:
                        if os.waitpid(-1, os.WNOHANG)[0] == 0:
                            time.sleep(0.01)
                    except ChildProcessError:
                        break
                os._exit(0)
        while True:  # reap every orphan of the host
            try:
                p, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not p:
                break
            if p == st["sshd"]:
                st["sshd"] = None
                if st["want"]:
                    time.sleep(0.05)
                    start()


# ----------------------------------------------- software wire: delay / jitter / loss / rate, in userspace
def wire_main(dev, tap, cfgfile):
    ps = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    ps.setsockopt(263, 15, 1)  # SOL_PACKET, PACKET_VNET_HDR: keep offloads intact
    ps.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    ps.bind((dev, 3))
    tf = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tf, 0x400454CA, struct.pack("16sH22x", tap.encode(), 0x0002 | 0x1000 | 0x4000))  # TAP, NO_PI, VNET_HDR
    fcntl.ioctl(tf, 0x400454D0, 0x01 | 0x02 | 0x04)  # TUNSETOFFLOAD: CSUM, TSO4, TSO6
    c = {}

    def load(*_):
        with open(cfgfile) as f:
            c.update(json.load(f))

    signal.signal(signal.SIGHUP, load)
    load()
    open(cfgfile + ".ready", "w").close()
    q, seq, last, free = [], 0, {0: 0.0, 1: 0.0}, {0: 0.0, 1: 0.0}
    poll = select.poll()
    poll.register(ps, select.POLLIN)
    poll.register(tf, select.POLLIN)
    while True:
        now = time.monotonic()
        while q and q[0][0] <= now:
            _, _, way, pkt = heapq.heappop(q)
            with contextlib.suppress(OSError):
                ps.send(pkt) if way else os.write(tf, pkt)
        for f, _ in poll.poll(max(0.0, (q[0][0] - now) * 1000) if q else None):
            for _ in range(64):
                try:
                    if f == tf:
                        pkt, way = os.read(tf, 70000), 1  # bridge -> host
                    else:
                        pkt, a = ps.recvfrom(70000, socket.MSG_DONTWAIT)
                        if a[2] == 4:  # PACKET_OUTGOING: our own
                            continue
                        way = 0
                except (BlockingIOError, InterruptedError):
                    break
                except OSError as e:
                    if e.errno == errno.ENETDOWN:
                        break
                    return
                p = c["loss_in"] if way else c["loss_out"]
                if p and random.random() * 100 < p:
                    continue
                t = time.monotonic()
                if c["rate"]:
                    t = free[way] = max(t, free[way]) + len(pkt) / c["rate"]
                t += c["delay"] + (random.uniform(-1, 1) * c["jitter"] if c["jitter"] else 0)
                t = last[way] = max(t, last[way])  # never reorder
                seq += 1
                heapq.heappush(q, (t, seq, way, pkt))


# ------------------------------------------------------------------------------------------------- CLI
def main(argv):
    """labhosts.py up N DIR [--gpus K] [--share PATH]... [--shared-tmp] | down DIR [--purge] | status DIR |
    ctl DIR HOST cut|blackhole|hide|restore|wire[ delay_ms=50 loss=1 ..]|unwire|power_off|power_on|reboot|stop_sshd|start_sshd|restart_sshd"""
    if argv[:1] == ["--init"]:
        return init_main(json.loads(argv[1]))
    if argv[:1] == ["--wire"]:
        return wire_main(*argv[1:])
    if len(argv) < 2:
        sys.exit(main.__doc__)
    if argv[0] == "up":
        kw, share, rest, it = {}, [], [], iter(argv[1:])
        for a in it:
            if a == "--gpus":
                kw["gpus"] = int(next(it))
            elif a == "--share":
                share.append(next(it))
            elif a == "--shared-tmp":
                kw["private_tmp"] = False
            else:
                rest.append(a)
        t = time.time()
        lab = Lab(rest[1]).up(int(rest[0]), share=share, **kw)
        for h in lab.hosts:
            print("%s %s  ssh -F %s %s" % (h.name, h.ip, lab.ssh_config, h.name))
        print("up in %.2f s" % (time.time() - t))
    elif argv[0] == "down":
        Lab(argv[1]).down(purge="--purge" in argv)
    elif argv[0] == "status":
        lab = Lab(argv[1])
        for h in lab.hosts:
            print(h.name, h.ip, "up" if h.up else "off", "wire" if _alive(h.wrec) else "")
    elif argv[0] == "ctl":
        h = Lab(argv[1])[argv[2]]
        kw = dict(x.split("=") for x in argv[4:])
        getattr(h, argv[3])(**{k: float(v) for k, v in kw.items()})
    else:
        sys.exit(main.__doc__)


if __name__ == "__main__":
    sys.path.insert(0, HERE)
    main(sys.argv[1:])
