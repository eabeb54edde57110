"""A receipt and an index as a person reads them, held against the numbers of their comparison."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser

GAIN = re.compile(
    r"The step waits (\d+)% → (\d+)% of the time, and trains ([\d.,]*\d) times as many images/s as "
    r"the (.+)$"
)
NO_GAIN = re.compile(
    r"The step waits (\d+)% of the time with the (.+?)(?:: no other way is (\d+)% faster)?$"
)


class Page(HTMLParser):
    """What a page loads, where it leads, and what it says."""

    def __init__(self, path):
        super().__init__()
        self.loads = []
        self.links = []
        self.text = ""
        self.tags = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("src", "srcset", "data") or (tag, name) == ("link", "href"):
                self.loads.append(value)
            if (tag, name) == ("a", "href"):
                self.links.append(value)

    def handle_data(self, data):
        self.text += data


def list_timed(content):
    return {row["title"]: row for row in content["strategies"] if row["images_per_second"]}


def agrees(text, value):
    """Whether a number is the value, rounded once or twice."""
    decimals = len(text.partition(".")[2])
    return abs(float(text.replace(",", "")) - value) <= 0.6 * 10**-decimals


def check_finding(html, content):
    """Hold the heading of a page against the rows of its comparison."""
    heading = unescape(re.search(r"<h1>(.*?)</h1>", html, re.DOTALL)[1]).strip()
    rows = list_timed(content)
    gain = GAIN.search(heading)
    waits, title = (gain[1], gain[4]) if gain else NO_GAIN.search(heading).group(1, 2)
    now = rows[title]
    assert agrees(waits, 100 * now["wait_share"])
    times = {
        row["title"]: row["images_per_second"] / now["images_per_second"] for row in rows.values()
    }
    if gain:
        fits = [
            row
            for row in rows.values()
            if agrees(gain[3], times[row["title"]]) and agrees(gain[2], 100 * row["wait_share"])
        ]
        assert fits
        assert any(
            times[row["title"]] >= 1 + max(measure_spread(row), measure_spread(now)) for row in fits
        )
    elif NO_GAIN.search(heading)[3]:
        assert max(times.values()) < 1 + float(NO_GAIN.search(heading)[3]) / 100
    step_ms = re.search(r"emulated ([\d.]+) ms", content["step"])
    if step_ms:
        shortest_ms = min(row["step_ms_median"] for row in rows.values())
        assert ("This machine is busy" in heading) == (shortest_ms >= 1.3 * float(step_ms[1]))


def measure_spread(row):
    repeats = sorted(row["repeats_images_per_second"])
    return (repeats[-1] - repeats[0]) / (sum(repeats) / len(repeats))


def check_page(page, content):
    html = page.read_text(encoding="utf-8")
    check_finding(html, content)
