"""The real nvidia-ml-py against the fake library.

Each check runs in a child process, because the loader reads LD_LIBRARY_PATH only at exec.
"""

import json
import os
import subprocess
import sys
import textwrap
import time

import pytest

PY = sys.executable


@pytest.fixture
def libdir(nvml_libdir):
    return nvml_libdir


@pytest.fixture
def nv(nvml):
    return nvml


class Child:
    """A process with pynvml loaded that evaluates what it is sent: state changes under its feet."""

    def __init__(self, nv, libdir):
        code = textwrap.dedent("""
            import sys, json, pynvml as N
            class E(Exception): pass
            for line in sys.stdin:
                try: r = eval(line, {"N": N, "H": lambda i=0: N.nvmlDeviceGetHandleByIndex(i), "G": globals()})
                except N.NVMLError as e: r = "!" + type(e).__name__
                try: s = json.dumps(r)
                except TypeError: s = json.dumps(str(r))
                print(s, flush=True)
        """)
        self.p = subprocess.Popen(
            [PY, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **nv.env(libdir)},
        )

    def __call__(self, expr):
        self.send(expr)
        return self.recv()

    def send(self, expr):
        self.p.stdin.write(expr + "\n")
        self.p.stdin.flush()

    def recv(self):
        return json.loads(self.p.stdout.readline())

    def close(self):
        self.p.stdin.close()
        self.p.wait(10)
        self.p.stdout.close()


@pytest.fixture
def c(nv, libdir):
    ch = Child(nv, libdir)
    assert ch("N.nvmlInit()") is None
    yield ch
    ch.close()


def test_identity(c, nv):
    assert c("N.nvmlDeviceGetCount()") == 4
    assert c("N.nvmlSystemGetDriverVersion()") == "580.95.05"
    assert c("N.nvmlSystemGetCudaDriverVersion()") == 13000
    assert c("N.nvmlDeviceGetName(H())") == "NVIDIA H100 80GB HBM3"
    assert c("[N.nvmlDeviceGetUUID(H(i)) for i in range(4)]") == nv.uuids()
    assert c("N.nvmlDeviceGetIndex(N.nvmlDeviceGetHandleByUUID(%r))" % nv.uuid(2)) == 2
    assert c("N.nvmlDeviceGetPciInfo(H(1)).busId") == "00000000:2B:00.0"
    assert c("N.nvmlDeviceGetIndex(N.nvmlDeviceGetHandleByPciBusId('00000000:2B:00.0'))") == 1
    assert c("N.nvmlDeviceGetMinorNumber(H(3))") == 3
    assert c("H(4)") == "!NVMLError_InvalidArgument"
    assert c("N.nvmlDeviceGetCudaComputeCapability(H())") == [9, 0]


def test_memory_v1_v2(c, nv):
    G = 1 << 30
    m = c("[getattr(N.nvmlDeviceGetMemoryInfo(H()), k) for k in ('total','free','used')]")
    assert m == [80 * G, 80 * G - G // 2, G // 2]  # v1: reserved is in used
    m = c("[getattr(N.nvmlDeviceGetMemoryInfo(H(), N.nvmlMemory_v2), k) for k in ('total','reserved','free','used')]")
    assert m == [80 * G, G // 2, 80 * G - G // 2, 0]
    assert c("N.nvmlDeviceGetMemoryInfo(H(), 7)") == "!NVMLError_ArgumentVersionMismatch"


def test_readings_change_live(c, nv):
    nv.set(0, util_gpu=97, temp=81, power=655000, clock_sm=1200, pstate=2, ecc_unc_vol=3)
    assert c("N.nvmlDeviceGetUtilizationRates(H()).gpu") == 97
    assert c("N.nvmlDeviceGetTemperature(H(), 0)") == 81
    assert c("N.nvmlDeviceGetTemperatureV(H(), 0)") == 81
    assert c("N.nvmlDeviceGetPowerUsage(H())") == 655000
    assert c("N.nvmlDeviceGetEnforcedPowerLimit(H())") == 700000
    assert c("N.nvmlDeviceGetClockInfo(H(), N.NVML_CLOCK_SM)") == 1200
    assert c("N.nvmlDeviceGetPerformanceState(H())") == 2
    assert c("N.nvmlDeviceGetTotalEccErrors(H(), 1, 0)") == 3
    assert c("[(f.nvmlReturn, f.value.ullVal) for f in N.nvmlDeviceGetFieldValues(H(), [4, 186, 230, 9999])]") == [
        [0, 3],
        [0, 655000],
        [0, 0],
        [3, c("N.nvmlDeviceGetFieldValues(H(), [9999])[0].value.ullVal")],
    ]
    nv.set(0, util_gpu=0)
    assert c("N.nvmlDeviceGetUtilizationRates(H()).gpu") == 0
    nv.set(0, temp="NS")
    assert c("N.nvmlDeviceGetTemperature(H(), 0)") == "!NVMLError_NotSupported"
    assert c("N.nvmlDeviceGetFanSpeed(H())") == "!NVMLError_NotSupported"
    assert c("N.nvmlDeviceGetMigMode(H())") == "!NVMLError_NotSupported"
    assert c("N.nvmlDeviceSetPowerManagementLimit(H(), 1)") == "!NVMLError_NoPermission"


PROCS = "[(p.pid, p.usedGpuMemory, p.gpuInstanceId) for p in N.%s(H(0))]"


def test_processes(c, nv):
    for fn in ("nvmlDeviceGetComputeRunningProcesses_v2", "nvmlDeviceGetComputeRunningProcesses_v3"):
        assert c(PROCS % fn) == []
    p = subprocess.Popen(["sleep", "60"])
    nv.use(0, p.pid, "2G", 55)
    nv.foreign(0, 4000001, "1G")
    nv.foreign(0, 4000002, "1G", static=False)  # no such pid: not shown
    for fn in ("nvmlDeviceGetComputeRunningProcesses_v2", "nvmlDeviceGetComputeRunningProcesses_v3"):
        assert sorted(c(PROCS % fn)) == sorted([[p.pid, 2 << 30, 0xFFFFFFFF], [4000001, 1 << 30, 0xFFFFFFFF]])
    assert c("len(N.nvmlDeviceGetRunningProcessDetailList(H(0), N.nvmlProcessDetailList_v1, 0))") == 2
    assert c("len(N.nvmlDeviceGetGraphicsRunningProcesses(H(0)))") == 0
    assert c("N.nvmlDeviceGetMemoryInfo(H(), N.nvmlMemory_v2).used") == 3 << 30
    assert c("N.nvmlDeviceGetUtilizationRates(H()).gpu") == 55
    assert c("[(s.pid, s.smUtil) for s in N.nvmlDeviceGetProcessUtilization(H(), 0) if s.smUtil]") == [[p.pid, 55]]
    assert c("N.nvmlSystemGetProcessName(%d)" % p.pid) == "sleep"
    p.kill()
    os.waitid(os.P_PID, p.pid, os.WEXITED | os.WNOWAIT)  # dead, not yet reaped: a zombie
    assert c(PROCS % "nvmlDeviceGetComputeRunningProcesses") == [[4000001, 1 << 30, 0xFFFFFFFF]]
    p.wait()
    assert c("N.nvmlDeviceGetMemoryInfo(H(), N.nvmlMemory_v2).used") == 1 << 30
    nv.evict(0)
    assert c("N.nvmlDeviceGetProcessUtilization(H(), 0)") == "!NVMLError_NotFound"  # no samples


def test_pid_reuse_is_not_fooled(c, nv):
    f = nv.use(0, os.getpid(), "1G")
    assert len(c(PROCS % "nvmlDeviceGetComputeRunningProcesses")) == 1
    with open(f, "w") as o:
        o.write("1G 0 C 12345\n")  # same pid, another start time
    assert c(PROCS % "nvmlDeviceGetComputeRunningProcesses") == []


def test_lost_and_back(c, nv):
    assert c("G.__setitem__('h2', H(2))") is None
    nv.lose(2)
    assert c("N.nvmlDeviceGetTemperature(G['h2'], 0)") == "!NVMLError_GpuIsLost"
    assert c("H(2)") == "!NVMLError_GpuIsLost"
    assert c("N.nvmlDeviceGetCount()") == 4
    assert c("N.nvmlDeviceGetIndex(H(3))") == 3
    nv.restore(2)
    assert c("N.nvmlDeviceGetTemperature(G['h2'], 0)") == 35


def test_removed_shifts_indices_only_after_init(c, nv, libdir):
    nv.remove(1)
    assert c("N.nvmlDeviceGetCount()") == 4 and c("H(1)") == "!NVMLError_GpuIsLost"
    d = Child(nv, libdir)
    d("N.nvmlInit()")
    assert d("N.nvmlDeviceGetCount()") == 3
    assert d("N.nvmlDeviceGetUUID(H(1))") == nv.uuid(2)  # index 1 is another GPU now
    d.close()


def test_xid_events(c, nv):
    c("G.__setitem__('evs', N.nvmlEventSetCreate())")
    assert (
        c("[N.nvmlDeviceRegisterEvents(H(i), N.nvmlEventTypeXidCriticalError, G['evs']) for i in range(4)]")
        == [None] * 4
    )
    t = time.time()
    assert c("N.nvmlEventSetWait_v2(G['evs'], 100)") == "!NVMLError_Timeout"
    assert 0.09 < time.time() - t < 1
    c.send(
        "(lambda e: (N.nvmlDeviceGetIndex(e.device), e.eventType, e.eventData, e.gpuInstanceId))(N.nvmlEventSetWait_v2(G['evs'], 5000))"
    )
    time.sleep(0.2)
    t = time.time()
    nv.xid(1, 31)
    assert c.recv() == [1, 8, 31, 0xFFFFFFFF] and time.time() - t < 0.2
    nv.xid(2, 79)
    nv.lose(2)
    assert c("N.nvmlEventSetWait_v2(G['evs'], 500).eventData") == 79  # the queued Xid comes first
    assert c("N.nvmlEventSetWait_v2(G['evs'], 500)") == "!NVMLError_GpuIsLost"


def test_mig(c, nv):
    nv.mig(3, ["1g.10gb", "3g.40gb"])
    assert c("N.nvmlDeviceGetMigMode(H(3))") == [1, 1]
    assert c("N.nvmlDeviceGetMaxMigDeviceCount(H(3))") == 7
    assert c("N.nvmlDeviceGetCount()") == 4
    m = "N.nvmlDeviceGetMigDeviceHandleByIndex(H(3), %d)"
    assert c("N.nvmlDeviceGetUUID(%s)" % (m % 1)).startswith("MIG-")
    assert c("N.nvmlDeviceGetMemoryInfo(%s).total" % (m % 1)) == 40 << 30
    assert c(m % 2) == "!NVMLError_NotFound"
    assert c("N.nvmlDeviceGetUtilizationRates(H(3))") == "!NVMLError_NotSupported"
    assert c("N.nvmlDeviceGetIndex(N.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(%s))" % (m % 0)) == 3
    u = c("N.nvmlDeviceGetUUID(%s)" % (m % 0))
    nv.use(u, os.getpid(), "3G")
    assert c("[(p.pid, p.gpuInstanceId) for p in N.nvmlDeviceGetComputeRunningProcesses(H(3))]") == [[os.getpid(), 1]]


def test_faults(c, nv):
    nv.error(1, "nvmlDeviceGetTemperature", 999)
    assert c("N.nvmlDeviceGetTemperature(H(1), 0)") == "!NVMLError_Unknown"
    assert c("N.nvmlDeviceGetTemperature(H(0), 0)") == 35
    nv.error(None, "nvmlDeviceGetCount", 13)
    assert c("N.nvmlDeviceGetCount()") == "!NVMLError_FunctionNotFound"
    nv.clear_faults()
    nv.delay(0, "*", 300)
    c("G.__setitem__('h', H(0))")
    t = time.time()
    c("N.nvmlDeviceGetTemperature(G['h'], 0)")
    assert time.time() - t > 0.29


def test_driver_not_loaded_and_no_library(nv, libdir):
    nv.unload_driver()
    d = Child(nv, libdir)
    assert d("N.nvmlInit()") == "!NVMLError_DriverNotLoaded"
    nv.load_driver()
    assert d("N.nvmlInit()") is None
    assert d("N.nvmlShutdown()") is None
    assert d("N.nvmlDeviceGetCount()") == "!NVMLError_Uninitialized"
    nv.set(None, init_error=18)
    assert d("N.nvmlInit()") == "!NVMLError_LibRmVersionMismatch"
    d.close()
    e = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    r = subprocess.run(
        [PY, "-c", "import pynvml; pynvml.nvmlInit()"], env=e, capture_output=True, text=True, check=False
    )
    assert "NVMLError_LibraryNotFound" in r.stderr


def test_editing_under_load_never_shows_a_torn_file(c, nv):
    end, n = time.time() + 2, 0
    while time.time() < end:
        nv.set(0, util_gpu=n % 101)
        assert c("(N.nvmlDeviceGetUtilizationRates(H()).gpu, N.nvmlDeviceGetCount())") == [n % 101, 4]
        n += 1
    assert n > 100
