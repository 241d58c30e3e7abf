"""Covers shardfn/memory/_ledger.py: the events of a ledger, their names, and the picture."""

import pathlib
import xml.etree.ElementTree

import pytest
import torch

from shardfn import memory


def test_events_have_names_and_add_up() -> None:
    weight = torch.ones(100)
    with memory.ledger(timeline=True) as book:
        book.count({"w": weight}, "device")
        x = torch.zeros(50)
        with memory.recorded_section("forward", ()):
            y = torch.empty(200)
            with memory.recorded_section("gather", ("params['w']", "params['b']")):
                z = torch.empty(25)
            del y
        with memory.on_host():
            h = torch.ones(3)
    found = book.timeline()
    assert found.live["device"] == (0, 400, 600, 1400, 1500, 700, 700) and found.live["host"][-1] == 12
    assert max(found.live["device"]) == book.peak("device")
    named = {"forward: aten.empty.memory_format": 800, "['w']": 400, "aten.zeros": 200}
    assert dict(found.largest) == named | {"gather params['w'] and 1 more": 100}
    inner, outer = found.sections
    assert (str(inner), inner.first, inner.end) == ("gather params['w'] and 1 more", 3, 4)
    assert (str(outer), outer.first, outer.end) == ("forward", 2, 5)
    del x, z, h


def test_the_picture_has_the_names(tmp_path: pathlib.Path) -> None:
    with memory.ledger(timeline=True) as book:
        with memory.recorded_section("backward", ()):
            x = torch.zeros(1 << 18)
            with memory.recorded_section("reduce", ("params['<b>']",)):
                y = torch.zeros(1 << 10)
    book.plot(tmp_path / "memory.svg")
    drawn = xml.etree.ElementTree.parse(tmp_path / "memory.svg").getroot()
    texts = ["".join(text.itertext()) for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "peak 1 MiB of the device, in backward" in texts and "backward" in texts
    assert "1 MiB   backward: aten.zeros" in texts and "reduce" in texts
    titles = ["".join(title.itertext()) for title in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert "reduce params['<b>']" in titles and "device" in titles and "host" not in titles
    del x, y


def test_an_empty_timeline_is_drawn(tmp_path: pathlib.Path) -> None:
    with memory.ledger(timeline=True) as book:
        pass
    book.plot(tmp_path / "memory.svg")
    assert "peak 0 MiB" in (tmp_path / "memory.svg").read_text()


def test_mistakes_are_named(tmp_path: pathlib.Path) -> None:
    with memory.ledger() as book:
        assert not memory.is_recorded()
    with pytest.raises(ValueError, match=r"keeps no timeline: open it by memory.ledger\(timeline=True\)"):
        book.plot(tmp_path / "memory.svg")
    with pytest.raises(ValueError, match=r"memory.png'\): the name must end in .svg"):
        book.plot(tmp_path / "memory.png")
    with pytest.raises(ValueError, match=r"ledger\(timeline=True\) is not supported on meta"):
        with memory.ledger("meta", timeline=True):
            pass
