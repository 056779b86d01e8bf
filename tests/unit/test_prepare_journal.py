"""A journal gives back what was finished and only that, whatever happened to its file."""

import pytest

from pipeline.store.journal import Journal


@pytest.fixture
def path(tmp_path):
    with Journal(tmp_path / "j") as journal:
        journal.append("a", [1, 2])
        journal.append("b", [3])
    return tmp_path / "j"


def read(path) -> dict:
    with Journal(path) as journal:
        return {key: journal[key] for key in "abc" if key in journal} | {"damaged": journal.damaged}


def test_what_was_appended_is_there(path):
    assert read(path) == {"a": [1, 2], "b": [3], "damaged": 0}


def test_every_torn_end_is_survived(path):
    """A process can die in any byte of a line; the next one goes on behind it."""
    whole = path.read_bytes()
    begin = whole.index(b"\n") + 1
    for end in range(begin, len(whole) - 1):
        path.write_bytes(whole[:end])
        torn = int(end > begin)
        assert read(path) == {"a": [1, 2], "damaged": torn}
        with Journal(path) as journal:
            assert len(journal) == 1
            journal.append("b", [3])
            journal.append("c", [4])
            assert journal["b"] == [3]
        assert read(path) == {"a": [1, 2], "b": [3], "c": [4], "damaged": torn}
    path.write_bytes(whole[:-1])  # only the newline is lost: the checksum says that the piece is whole
    assert read(path) == {"a": [1, 2], "b": [3], "damaged": 0}


def test_every_flipped_bit_is_seen(path):
    whole = path.read_bytes()
    for position in range(len(whole)):
        for bit in range(8):
            changed = bytearray(whole)
            changed[position] ^= 1 << bit
            path.write_bytes(changed)
            found = read(path)
            assert found.pop("damaged") >= 1
            assert len(found) <= 1
            assert all(found[key] == {"a": [1, 2], "b": [3]}[key] for key in found)
