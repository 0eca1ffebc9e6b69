"""When a shim puts an end on disk: at once where nobody could be told, soon where the server may not have it, never twice."""

import contextlib
import os
import socket

import pytest

from cotenant.hostd import shim

REQUEST = b'{"base": "x", "secrets": {}, "stored": true}'


@pytest.fixture
def ended(tmp_path):
    """The record of an attempt that has just ended, and the socket between its shim and hostd."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    record = os.open(tmp_path / "record", os.O_RDWR | os.O_CREAT)
    yield shim._Ended(record), ours, theirs, record
    ours.close()
    theirs.close()
    with contextlib.suppress(OSError):
        os.close(record)


@pytest.fixture
def synced(monkeypatch):
    """The descriptors that were synced, in order; `then` is called after each."""
    done, then = [], []

    def fdatasync(fd):
        done.append(fd)
        for call in then:
            call()

    monkeypatch.setattr("cotenant.hostd.shim.os.fdatasync", fdatasync)
    done_and_then = (done, then)
    return done_and_then


def test_an_end_that_the_server_has_needs_no_sync(ended, synced):
    end, ours, theirs, _ = ended
    theirs.send(REQUEST)
    request, fds = end.wait(ours)
    end.sync_unless(request["stored"])()
    assert synced[0] == [] and fds == []


def test_one_that_the_server_may_not_have_is_synced_once_the_next_command_runs(ended, synced):
    end, ours, theirs, record = ended
    theirs.send(REQUEST)
    end.wait(ours)
    started = end.sync_unless(False)
    assert synced[0] == [], "not on the road of the next start"
    started()
    started()
    assert synced[0] == [record]


def test_one_after_which_nothing_comes_is_synced_soon(ended, synced):
    end, ours, theirs, record = ended
    synced[1].append(lambda: theirs.send(REQUEST))  # only then, so that wait() ends
    request, _ = end.wait(ours)
    end.sync_unless(request["stored"])()
    assert synced[0] == [record]


def test_one_whose_hostd_is_gone_is_synced(ended, synced):
    end, ours, theirs, record = ended
    theirs.close()
    assert end.wait(ours) == (None, [])
    assert synced[0] == [record]


def test_a_late_word_about_an_earlier_attempt_is_passed_over(ended, synced):
    end, ours, theirs, _ = ended
    theirs.send(b"g/some/base")
    theirs.send(REQUEST)
    assert end.wait(ours)[0]["base"] == "x"


def test_an_end_of_which_nobody_could_be_told_is_synced_at_once(tmp_path, synced):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    record = os.open(tmp_path / "record", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    with ours, theirs:
        kept = shim.Shim(str(tmp_path), {}, ours, -1, record)
        assert kept._finish({"code": 0}) and synced[0] == []
        assert theirs.recv(4096).startswith(b'e {"code": 0')
        theirs.close()
        assert kept._finish({"code": 0}) and synced[0] == [record]
    os.close(record)
