"""Segments: read by another process, refused when they differ from the announced ones, gone with their owner."""

import os
import pickle
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shardfn.collectives.transport._segment import NotSharedError, Offer, Reader, Segment


@contextmanager
def _owner(size: int, content: bytes) -> Iterator[Offer]:
    """Another process that offers a segment, until it is killed at the end."""
    there, back = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            segment = Segment(size)
            segment.view[: len(content)] = content
            os.write(back, pickle.dumps(segment.offer))
            signal.pause()
        finally:
            os._exit(1)
    os.close(back)
    try:
        yield pickle.loads(os.read(there, 4096))
    finally:
        os.close(there)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_another_process_reads_the_bytes_of_its_owner():
    with _owner(100_003, b"abc") as offer:
        reader = Reader(offer)
        assert len(reader.view) == 100_003
        assert bytes(reader.view[:4]) == b"abc\0"
        reader.close()


def test_a_writer_is_seen_and_a_reader_cannot_write():
    segment = Segment(10)
    reader = Reader(segment.offer)
    segment.view[3:6] = b"xyz"
    assert bytes(reader.view) == b"\0\0\0xyz\0\0\0\0"
    assert reader.view.readonly
    reader.close()
    segment.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"word": b"0" * 16}, "another word"),
        pytest.param({"size": 1 << 20}, "announced 1048576", marks=pytest.mark.nightly),
        pytest.param({"descriptor": 9999}, "opened", marks=pytest.mark.nightly),
    ],
)
def test_segments_that_were_not_announced_are_refused(change, message):
    segment = Segment(10)
    with pytest.raises(NotSharedError, match=message):
        Reader(segment.offer._replace(**change))
    segment.close()


def test_files_pipes_and_unsealed_memory_are_refused_at_once(tmp_path):
    there, back = os.pipe()
    plain = os.memfd_create("plain")
    file = os.open(tmp_path / "x", os.O_CREAT | os.O_RDWR)
    for fd, message in ((there, "is not a memfd"), (file, "is not a memfd"), (plain, "change its size")):
        with pytest.raises(NotSharedError, match=message):
            Reader(Offer(os.getpid(), fd, 10, b"0" * 16))
    for fd in (there, back, plain, file):
        os.close(fd)


def test_a_size_cannot_change_under_its_readers():
    segment = Segment(10)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.offer.descriptor, 0)
    segment.close()


def test_a_killed_owner_leaves_its_readers_their_pages():
    with _owner(1 << 20, b"last words") as offer:
        reader = Reader(offer)
    assert bytes(reader.view[:10]) == b"last words"
    with pytest.raises(NotSharedError, match="opened"):
        Reader(offer)
    reader.close()


def test_no_folder_has_a_name_for_it_so_nothing_can_be_left():
    segment = Segment(10)
    assert os.fstat(segment.offer.descriptor).st_nlink == 0
    segment.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_refused():
    segment = Segment(10)
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        try:
            Reader(segment.offer)
        except NotSharedError as error:
            os._exit(0 if "Permission denied" in str(error) else 2)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    segment.close()
