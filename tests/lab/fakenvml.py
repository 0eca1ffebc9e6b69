"""fakenvml - build nvml_fake.c and edit its state file.  Standard library only.  SPDX: MIT.

nv = FakeNvml("/some/dir/nvml.state")
nv.create(gpus=4, mem="80G")
env = {**os.environ, **nv.env(libdir)}     # what a process needs to see the fake GPUs
nv.set(2, util_gpu=0, temp=71)             # any key of README.md; value "NS" = not supported
nv.lose(2); nv.restore(2)                  # NVML_ERROR_GPU_IS_LOST and back
nv.remove(3)                               # gone at the next nvmlInit: later indices shift
nv.xid(1, 79)                              # delivered to every waiting event set
nv.use(0, pid, mem="2G", util=90)          # a process on a GPU; drops out when pid dies
nv.foreign(0, 4242, mem="1G")              # ... one whose pid does not exist here
nv.error(1, "nvmlDeviceGetTemperature", 999); nv.delay(None, "*", 3000); nv.clear_faults()
"""

import contextlib
import fcntl
import itertools
import os
import subprocess
import sys
import tempfile
import uuid as _uuid

HERE = os.path.dirname(os.path.abspath(__file__))
XID = 0x8


SOURCE = os.path.join(HERE, "nvml_fake.c")


def build(libdir, source=SOURCE):
    """Compile libnvidia-ml.so.1 into libdir (skipped when newer than the source)."""
    os.makedirs(libdir, exist_ok=True)
    out = os.path.join(libdir, "libnvidia-ml.so.1")
    if not os.path.exists(out) or os.stat(out).st_mtime < os.stat(source).st_mtime:
        tmp = out + ".%d" % os.getpid()
        subprocess.run(
            [
                "gcc",
                "-O2",
                "-shared",
                "-fPIC",
                "-Wall",
                "-Wl,-soname,libnvidia-ml.so.1",
                "-o",
                tmp,
                source,
                "-lpthread",
            ],
            check=True,
        )
        os.replace(tmp, out)
    return out


def start_ticks(pid):
    """Field 22 of /proc/PID/stat: with the pid it names one process for ever (until reboot)."""
    with open("/proc/%d/stat" % pid, "rb") as f:
        return int(f.read().rsplit(b")", 1)[1].split()[19])


class FakeNvml:
    def __init__(self, path):
        self.path = os.path.abspath(os.fspath(path))

    # ---- whole file
    def create(self, gpus=4, host="h", name="NVIDIA H100 80GB HBM3", mem="80G", **keys):
        lines = ["driver 580.95.05", "nvml 13.580.95.05", "cuda 13000"]
        for i in range(gpus):
            u = _uuid.uuid5(_uuid.NAMESPACE_OID, "fakenvml/%s/%d" % (host, i))
            lines += [
                "[gpu]",
                "uuid GPU-%s" % u,
                "name %s" % name,
                "serial 16%011d" % (abs(u.int) % 10**11),
                "bus 00000000:%02X:00.0" % (0x1B + 0x10 * i),
                "minor %d" % i,
                "mem_total %s" % mem,
                "mem_reserved 512M",
            ]
            lines += ["%s %s" % kv for kv in keys.items()]
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self._write(lines)
        return self

    def env(self, libdir=None):
        e = {"FAKE_NVML_STATE": self.path}
        if libdir:
            old = os.environ.get("LD_LIBRARY_PATH")
            e["LD_LIBRARY_PATH"] = str(libdir) + (":" + old if old else "")
        return e

    def unload_driver(self):
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, self.path + ".off")

    def load_driver(self):
        os.rename(self.path + ".off", self.path)

    # ---- one GPU
    def uuids(self):
        return [l.split(None, 1)[1] for l in self._read() if l.startswith("uuid ")]

    def uuid(self, gpu):
        if isinstance(gpu, str):
            return gpu
        heads, u = self._sections(self._read()), []
        for a, b, kind in heads:
            if kind == "[gpu]":
                u.append(next(l.split(None, 1)[1] for l in self._read()[a:b] if l.startswith("uuid ")))
        return u[gpu]

    def set(self, gpu, **keys):
        """gpu: index or uuid; None sets a global key.  value None deletes the key."""
        with self._edit() as L:
            a, b = self._span(L, gpu)
            body = [l for l in L[a:b] if l.split(None, 1)[0] not in keys]
            at = 1 if gpu is not None else 0
            body[at:at] = ["%s %s" % (k, v) for k, v in keys.items() if v is not None]
            L[a:b] = body

    def lose(self, gpu):
        self.set(gpu, lost=1)

    def restore(self, gpu):
        self.set(gpu, lost=None, absent=None)

    def remove(self, gpu):
        self.set(gpu, absent=1)

    def _inject(self, kind, gpu, fn, n):
        with self._edit() as L:
            _a, b = self._span(L, gpu)
            L.insert(b, "%s %s %d" % (kind, fn, n))

    def error(self, gpu, fn, code):
        """fn: full name, name without _vN, or '*'.  gpu None: system calls too."""
        self._inject("error", gpu, fn, code)

    def delay(self, gpu, fn, ms):
        self._inject("delay", gpu, fn, ms)

    def clear_faults(self):
        with self._edit() as L:
            L[:] = [l for l in L if l.split(None, 1)[0] not in ("error", "delay", "lost", "absent")]

    def event(self, gpu, etype, data):
        u = self.uuid(gpu)
        with self._edit() as L:
            seqs = [int(l.split()[1]) for l in L if l.startswith("event ")]
            n = max(seqs, default=0) + 1
            a, b = self._span(L, None)
            keep = [l for l in L[a:b] if not l.startswith("event ") or int(l.split()[1]) > n - 100]
            L[a:b] = [*keep, "event %d %s 0x%x %d" % (n, u, etype, data)]
        return n

    def xid(self, gpu, number):
        return self.event(gpu, XID, number)

    def mig(self, gpu, profiles=("1g.10gb",) * 7):
        """Turn MIG on with one device per profile."""
        base = self.uuid(gpu)
        with self._edit() as L:
            _a, b = self._span(L, gpu)
            new = ["mig_mode 1", "mig_pending 1"]
            for i, p in enumerate(profiles):
                u = _uuid.uuid5(_uuid.NAMESPACE_OID, "mig/%s/%d" % (base, i))
                new += [
                    "[mig]",
                    "uuid MIG-%s" % u,
                    "name NVIDIA H100 80GB HBM3 MIG %s" % p,
                    "gi %d" % (i + 1),
                    "ci 0",
                    "slices %s" % p[0],
                    "mem_total %sG" % p.split(".")[1].rstrip("gb"),
                    "mem_reserved 0",
                ]
            L[b:b] = new

    # ---- processes
    def use(self, gpu, pid=None, mem="1G", util=0, kind="C", pin=True):
        """A live process on a GPU: a claim file, dropped by the library once pid is gone."""
        pid = pid or os.getpid()
        d = os.path.join(self.path + ".procs", self.uuid(gpu))
        os.makedirs(d, exist_ok=True)
        with contextlib.suppress(PermissionError):
            os.chmod(d, 0o1777)
        f = os.path.join(d, str(pid))
        tmp = os.path.join(d, ".%d.tmp" % os.getpid())
        with open(tmp, "w") as o:
            o.write("%s %d %s %d\n" % (mem, util, kind, start_ticks(pid) if pin else 0))
        os.replace(tmp, f)
        return f

    def unuse(self, gpu, pid=None):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path + ".procs", self.uuid(gpu), str(pid or os.getpid())))

    def foreign(self, gpu, pid, mem="1G", util=0, kind="C", static=True):
        """A process line in the file itself; static: shown though the pid is not ours to see."""
        with self._edit() as L:
            _a, b = self._span(L, gpu)
            L.insert(b, "proc %d %s %d %s 0%s" % (pid, mem, util, kind, " static" if static else ""))

    def evict(self, gpu, pid=None):
        with self._edit() as L:
            a, b = self._span(L, gpu)
            L[a:b] = [l for l in L[a:b] if not (l.startswith("proc ") and pid in (None, int(l.split()[1])))]

    # ---- file mechanics
    def _read(self):
        with open(self.path) as f:
            return [l.strip() for l in f if l.strip() and not l.lstrip().startswith("#")]

    def _write(self, lines):
        fd, tmp = tempfile.mkstemp(dir=os.path.dirname(self.path), prefix=".nv")
        with os.fdopen(fd, "w") as f:
            f.write("\n".join(lines) + "\n")
        os.chmod(tmp, 0o644)
        os.replace(tmp, self.path)

    @contextlib.contextmanager
    def _edit(self):
        with open(self.path + ".lock", "w") as lk:
            fcntl.flock(lk, fcntl.LOCK_EX)
            L = self._read()
            yield L
            self._write(L)

    @staticmethod
    def _sections(L):
        heads = [i for i, l in enumerate(L) if l in ("[gpu]", "[mig]")] + [len(L)]
        return [(a, b, L[a]) for a, b in itertools.pairwise(heads)]

    def _span(self, L, gpu):
        """(first, last) line numbers of a section; None = the global part."""
        secs = self._sections(L)
        if gpu is None:
            return 0, secs[0][0] if secs else len(L)
        if isinstance(gpu, int):
            return [(a, b) for a, b, k in secs if k == "[gpu]"][gpu]
        for a, b, _ in secs:
            if "uuid " + gpu in L[a:b]:
                return a, b
        raise KeyError(gpu)


def main(argv):
    """fakenvml.py STATE create [N] | set GPU k=v.. | lose|restore|remove|mig GPU | xid GPU N |
    use GPU PID [MEM] [UTIL] | foreign GPU PID [MEM] | error|delay GPU|- FN N | clear | build DIR"""
    if len(argv) < 2:
        sys.exit(main.__doc__)
    nv, cmd, a = FakeNvml(argv[0]), argv[1], argv[2:]
    g = (None if a[0] == "-" else int(a[0]) if a[0].lstrip("-").isdigit() else a[0]) if a else None
    if cmd == "create":
        nv.create(int(a[0]) if a else 4)
    elif cmd == "set":
        nv.set(g, **dict(x.split("=", 1) for x in a[1:]))
    elif cmd in ("lose", "restore", "remove", "mig"):
        getattr(nv, cmd)(g)
    elif cmd == "xid":
        nv.xid(g, int(a[1]))
    elif cmd in ("use", "foreign"):
        getattr(nv, cmd)(g, int(a[1]), *a[2:3])
    elif cmd in ("error", "delay"):
        getattr(nv, cmd)(g, a[1], int(a[2]))
    elif cmd == "clear":
        nv.clear_faults()
    elif cmd == "build":
        print(build(a[0]))
    else:
        sys.exit(main.__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
