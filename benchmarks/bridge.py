"""What `cotenant mcp-stdio` adds to a call, and how long a client waits for its first answer.

The same frame goes to the same server in turn: over one kept connection, and through the bridge's pipes. `connect` is the
time from the start of the bridge's process to its answer to a client's greeting, in both eras.

.venv/bin/python benchmarks/bridge.py [--rounds 9] [--calls 300] [--tool quota_status]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Result, percentile, rotate, save, table
from jobs import Cotenant

from cotenant.ui.cli.client import PROTOCOL
from cotenant.ui.cli.wire import Wire

META = {
    "io.modelcontextprotocol/protocolVersion": PROTOCOL,
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "1"},
}


def frame(ident: int, method: str, params: dict[str, Any], *, meta: bool = True) -> bytes:
    params = {**params, "_meta": META} if meta else params
    return json.dumps({"jsonrpc": "2.0", "id": ident, "method": method, "params": params}).encode()


class Bridge:
    """The bridge as a client has it: a process and two pipes."""

    def __init__(self, there: Cotenant) -> None:
        command = [str(Path(sys.executable).with_name("cotenant")), "mcp-stdio", "--url", there.url]
        environment = {**os.environ, "COTENANT_TOKEN": there.token}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=-1
        )

    def ask(self, line: bytes) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate(timeout=10)


class Direct:
    """The same frames without a bridge, over one kept connection."""

    def __init__(self, there: Cotenant, tool: str) -> None:
        self._wire = Wire(there.url)
        self._headers = {
            "Authorization": f"Bearer {there.token}",
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
            "MCP-Protocol-Version": PROTOCOL,
            "Mcp-Method": "tools/call",
            "Mcp-Name": tool,
        }

    def ask(self, line: bytes) -> Any:
        return json.loads(self._wire.post("/mcp", line, self._headers, answer_s=30).body())


def calls(ask: Callable[[bytes], Any], tool: str, count: int) -> Result:
    took = []
    for ident in range(count):
        line = frame(ident, "tools/call", {"name": tool, "arguments": {}})
        began = time.perf_counter()
        answer = ask(line)
        took.append((time.perf_counter() - began) * 1e3)
        assert answer["id"] == ident and "structuredContent" in answer["result"], answer
    return {"p50 ms": percentile(took, 50), "p90 ms": percentile(took, 90)}


def connect(there: Cotenant, older: bool) -> Result:
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}}
    line = frame(0, "initialize", hello, meta=False) if older else frame(0, "server/discover", {})
    began = time.perf_counter()
    bridge = Bridge(there)
    answer = bridge.ask(line)
    took = time.perf_counter() - began
    assert "result" in answer, answer
    bridge.close()
    return {"connect s": took}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=300, help="calls of each kind in a round")
    parser.add_argument("--tool", default="quota_status")
    parser.add_argument("--save", help="write the raw numbers to this file")
    options = parser.parse_args()
    with Cotenant() as there:
        bridge, direct = Bridge(there), Direct(there, options.tool)
        results = rotate(
            {
                "direct": lambda: calls(direct.ask, options.tool, options.calls),
                "bridge": lambda: calls(bridge.ask, options.tool, options.calls),
                "greeting 2026-07-28": lambda: connect(there, older=False),
                "greeting 2025-11-25": lambda: connect(there, older=True),
            },
            options.rounds,
        )
        bridge.close()
    print(table("The bridge", results, "direct"))
    added = [b["p50 ms"] - d["p50 ms"] for b, d in zip(results["bridge"], results["direct"], strict=True)]
    print(f"added to p50, round by round: {statistics.median(added):.2f} ms ({min(added):.2f} to {max(added):.2f})")
    save(options.save, "bridge", results)


if __name__ == "__main__":
    main()
