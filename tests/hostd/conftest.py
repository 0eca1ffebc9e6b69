"""A running hostd for each test: `hostd` with simulated cards, `nvml_hostd` with the fake NVML."""

import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))

from hostdclient import Hostd


@pytest.fixture
async def hostd(tmp_path):
    """hostd with two simulated cards, greeted; everything it started is gone afterwards."""
    async with Hostd(tmp_path, simulate=2) as running:
        yield running


@pytest.fixture
async def nvml_hostd(tmp_path, nvml, nvml_libdir):
    """hostd over four fake NVIDIA cards (the fixture `nvml` changes them), greeted."""
    async with Hostd(tmp_path, env=nvml.env(nvml_libdir)) as running:
        yield running
