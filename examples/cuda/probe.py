#!/usr/bin/env python3
"""Use one CUDA card for real, with nothing but the driver: the job that scripts/gpu-check submits.

Takes memory on the first card it can see, writes a pattern, reads it back, and prints what it found. Exits 0 when the card did as
told, 1 when it did not, 3 where there is no driver or no card to see.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import time
import uuid
from typing import Any

PATTERN = 0xA5


class CudaError(Exception):
    """A call of the driver failed; the text names the call and the driver's own word for it."""


class Driver:
    """libcuda.so.1 over ctypes: the few calls that are needed, checked."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: Any) -> None:
        """Call one function; raises CudaError unless it says success."""
        code = getattr(self.lib, name)(*arguments)
        if code != 0:
            word = ctypes.c_char_p()
            self.lib.cuGetErrorName(code, ctypes.byref(word))
            raise CudaError(f"{name}: {(word.value or b'unknown').decode()} ({code})")


def probe(mib: int, hold_s: float) -> int:
    """Take `mib` MiB of the first visible card, check a pattern in it, keep it for `hold_s` seconds."""
    try:
        cuda = Driver()
    except OSError as why:
        print(f"no CUDA driver: {why}")
        return 3
    count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    name, identity = ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)()
    free, total, pointer = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_uint64()
    try:
        cuda.call("cuInit", 0)
        cuda.call("cuDeviceGetCount", ctypes.byref(count))
    except CudaError as why:
        print(f"no card to see: {why}")
        return 3
    print(f"visible cards: {count.value} (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '(not set)')})")
    if count.value == 0:
        return 3
    try:
        cuda.call("cuDeviceGet", ctypes.byref(device), 0)
        cuda.call("cuDeviceGetName", name, len(name), device)
        cuda.call("cuDeviceGetUuid_v2", ctypes.byref(identity), device)
        cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        cuda.call("cuCtxSetCurrent", context)
        cuda.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        print(f"card: {name.value.decode()} GPU-{uuid.UUID(bytes=bytes(identity))}")
        print(f"memory: {free.value >> 20} of {total.value >> 20} MiB free")
        size = mib << 20
        cuda.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        cuda.call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(PATTERN), ctypes.c_size_t(size))
        back = (ctypes.c_ubyte * 4096)()
        end = ctypes.c_uint64(pointer.value + size - len(back))
        cuda.call("cuMemcpyDtoH_v2", back, end, ctypes.c_size_t(len(back)))
        time.sleep(hold_s)
        cuda.call("cuMemFree_v2", pointer)
        cuda.call("cuDevicePrimaryCtxRelease_v2", device)
    except CudaError as why:
        print(f"the card did not do as told: {why}")
        return 1
    good = all(byte == PATTERN for byte in back)
    print(f"wrote {mib} MiB and read the end of it back: {'as written' if good else 'NOT as written'}")
    seen, leased = f"GPU-{uuid.UUID(bytes=bytes(identity))}", os.environ.get("COTENANT_GPU_UUIDS", "")
    if leased and not leased.startswith("MIG-") and seen not in leased.split(","):
        print(f"NOT the leased card: {leased}")
        good = False
    return 0 if good else 1


def main() -> int:
    """Read the arguments and probe."""
    parser = argparse.ArgumentParser(description="Use one CUDA card for real, and say what was found.")
    parser.add_argument("--mib", type=int, default=1024, help="memory to take (default 1024)")
    parser.add_argument("--hold-s", type=float, default=3.0, help="how long to keep it (default 3)")
    args = parser.parse_args()
    return probe(args.mib, args.hold_s)


if __name__ == "__main__":
    sys.exit(main())
