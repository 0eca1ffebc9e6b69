#!/usr/bin/env python3
"""fakecuda - a stand-in for a CUDA program, for jobs in tests.  Standard library only.  SPDX: MIT.

    fakecuda.py [--mem 2G] [--util 90] [--for 30] [--count N] [-- CMD...]

Obeys CUDA_VISIBLE_DEVICES the way the CUDA guide says (unset = all, "" or -1 = none, indices, GPU-/MIG- uuids
and unique prefixes of them; the list ends at the first invalid entry), takes memory on the first N visible
GPUs of the fake NVML state (default 1), and holds it for --for seconds or while CMD runs (exec'd: same pid).
Prints one line "fakecuda: UUID..." first.  Exit 1 with a CUDA-like message when there is no device, not enough
free memory, or the GPU is lost meanwhile.  Also importable: visible(), claim().
"""

import fcntl
import os
import sys
import time

STATE = os.environ.get("FAKE_NVML_STATE") or "/run/fake-nvml/state"
UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def num(s):
    s = str(s)
    u = UNITS.get(s[-1:].lower())
    return int(float(s[:-1]) * u) if u else int(float(s))


def devices():
    """[{uuid, parent, procs, ...}] in NVML (PCI) order; MIG devices follow their GPU."""
    out, gpu = [], None
    with open(STATE) as f:
        for line in f:
            k, _, v = line.strip().partition(" ")
            if k in ("[gpu]", "[mig]"):
                out.append({"parent": gpu if k == "[mig]" else None, "procs": []})
                if k == "[gpu]":
                    gpu = out[-1]
            elif out and k == "proc":
                out[-1]["procs"].append(v.split())
            elif out and k:
                out[-1][k] = v
    return out


def visible(env=None):
    env = os.environ if env is None else env
    devs = devices()
    gpus = [d for d in devs if d["parent"] is None and d.get("absent", "0") == "0"]
    if env.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST") != "PCI_BUS_ID":
        gpus = sorted(gpus, key=lambda d: -float(d.get("speed", 0)))  # stable: same speed = PCI order
    want = env.get("CUDA_VISIBLE_DEVICES")
    if want is None:
        return gpus
    got = []
    for w in want.split(","):
        w = w.strip()
        if w.startswith(("GPU-", "MIG-")):
            m = [d for d in devs if d["uuid"].lower().startswith(w.lower())]
            d = m[0] if len(m) == 1 else None
        else:
            d = gpus[int(w)] if w.isdigit() and int(w) < len(gpus) else None
        if d is None or d in got:
            break
        got.append(d)
    return got


def alive(pid, start):
    try:
        with open("/proc/%s/stat" % pid, "rb") as f:
            s = f.read().rsplit(b")", 1)[1].split()
        return s[0] not in b"ZX" and (not int(start) or s[19] == str(start).encode())
    except (OSError, IndexError):
        return False


def free(d):
    used = num(d.get("mem_used", 0)) + num(d.get("mem_reserved", 0))
    for p in d["procs"]:
        if p[1] != "NA" and (p[-1] == "static" or alive(p[0], p[4] if len(p) > 4 else 0)):
            used += num(p[1])
    folder = "%s.procs/%s" % (STATE, d["uuid"])
    for pid in os.listdir(folder) if os.path.isdir(folder) else []:
        if pid.isdigit() and int(pid) != os.getpid():
            try:
                with open("%s/%s" % (folder, pid)) as f:
                    m, _, _, st = f.read().split()
            except (OSError, ValueError):
                continue
            if m != "NA" and alive(pid, st):
                used += num(m)
    return num(d.get("mem_total", "80G")) - used


def claim(d, mem, util=0):
    """Memory on one device for this very process; released by the fake library when the process ends."""
    if d.get("lost", "0") != "0":
        raise RuntimeError("CUDA error: no CUDA-capable device is detected")
    folder = "%s.procs/%s" % (STATE, d["uuid"])
    try:
        old = os.umask(0)
        os.makedirs(folder, mode=0o1777, exist_ok=True)
        os.umask(old)
    except PermissionError:
        raise RuntimeError("CUDA error: unknown error (cannot write %s)" % folder) from None
    with open(folder + "/.lock", "w") as lk:
        fcntl.flock(lk, fcntl.LOCK_EX)
        if num(mem) > free(d):
            raise RuntimeError(
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate %s on %s" % (mem, d["uuid"])
            )
        with open("/proc/self/stat", "rb") as f:
            start = f.read().rsplit(b")", 1)[1].split()[19].decode()
        tmp = "%s/.%d" % (folder, os.getpid())
        with open(tmp, "w") as f:
            f.write("%d %d C %s\n" % (num(mem), util, start))
        os.rename(tmp, "%s/%d" % (folder, os.getpid()))


def main(argv):
    opt, cmd = {"--mem": "1G", "--util": "80", "--for": "0", "--count": "1"}, []
    while argv:
        a = argv.pop(0)
        if a == "--":
            cmd, argv = argv, []
        elif a in opt:
            opt[a] = argv.pop(0)
        else:
            sys.exit(__doc__)
    v = visible()[: int(opt["--count"])]
    if len(v) < int(opt["--count"]):
        print("RuntimeError: No CUDA GPUs are available (%d of %s visible)" % (len(v), opt["--count"]), file=sys.stderr)
        return 1
    try:
        for d in v:
            claim(d, opt["--mem"], int(opt["--util"]))
    except RuntimeError as e:
        print(e, file=sys.stderr)
        return 1
    print("fakecuda: " + " ".join(d["uuid"] for d in v), flush=True)
    if cmd:
        os.execvp(cmd[0], cmd)
    end = time.time() + float(opt["--for"])
    while time.time() < end:
        time.sleep(min(0.2, max(0, end - time.time())))
        now = {d["uuid"]: d for d in devices()}
        for d in v:
            if d["uuid"] not in now or now[d["uuid"]].get("lost", "0") != "0":
                print("CUDA error: unspecified launch failure (GPU is lost)", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
