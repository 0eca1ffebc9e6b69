"""HyperQueue through the Python API of its PyPI package; run with the interpreter that has it. Prints one JSON line.

Its wait call polls about once a second, so totals end at the last job's own stamp.

    jobs_hq.py total N STAMP | array N STAMP | latency N STAMP

"array" is one job of N tasks in one submit, the nearest that its Python API has.
"""

import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

import hyperqueue.client
from hyperqueue import Job, LocalCluster
from hyperqueue.cluster import WorkerConfig

hyperqueue.client.create_progress_callback = lambda: lambda jobs: None
logging.disable(logging.CRITICAL)
os.chdir(tempfile.mkdtemp(prefix="hq"))
what, count, stamp = sys.argv[1], int(sys.argv[2]), sys.argv[3]
path = os.path.abspath("stamps")


def job(args):
    one = Job()
    one.program(args, stdout=None, stderr=None)
    return one


with LocalCluster(worker_config=WorkerConfig(cores=2)) as cluster:
    client = cluster.client()
    client.wait_for_jobs([client.submit(job(["true"]))])
    if what in ("total", "array"):
        began = time.monotonic_ns()
        if what == "array":
            whole = Job()
            for _ in range(count):
                whole.program([stamp, path], stdout=None, stderr=None)
            jobs = [client.submit(whole)]
        else:
            jobs = [client.submit(job([stamp, path])) for _ in range(count)]
        client.wait_for_jobs(jobs)
        with open(path) as file:
            stamps = [int(word) for word in file.read().split()]
        assert len(stamps) == count, len(stamps)
        out = {"total s": (max(stamps) - began) / 1e9}
    else:
        took = []
        for _ in range(count):
            open(path, "w").close()
            began = time.monotonic_ns()
            client.submit(job([stamp, path]))
            while not (text := Path(path).read_text()).endswith("\n"):
                time.sleep(0.0002)
            took.append((int(text) - began) / 1e6)
            time.sleep(0.02)
        took.sort()
        out = {"dispatch p50 ms": took[len(took) // 2], "dispatch p99 ms": took[int(len(took) * 0.99)]}
print("JSON " + json.dumps(out), flush=True)
os._exit(0)
