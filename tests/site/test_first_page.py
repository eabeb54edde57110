"""The first page of the site, in Chromium on a phone and on a desk: ``make test-browser``.

axe-core judges its accessibility where ``make test-browser`` could have it from npm. Screenshots
are left in ``runs/browser``.
"""

import re

import pytest

from tools.cells import ROOT

FIRST = ROOT / "docs" / "site" / "first"
PICTURES = ROOT / "runs" / "browser"
AXE = ROOT / "runs" / "npm" / "node_modules" / "axe-core" / "axe.min.js"
MOST_BYTES = 300_000
SCREENS = {"phone": {"width": 390, "height": 844}, "desk": {"width": 1280, "height": 900}}
FIND_OVERFLOW = """() => [...document.querySelectorAll('body *')]
  .filter(one => !one.closest('pre') && one.getBoundingClientRect().right > innerWidth + 1)
  .map(one => one.outerHTML.slice(0, 80))"""
FIND_VIOLATIONS = """async () => (await axe.run({ preload: false })).violations
  .map(one => `${one.id}: ${one.nodes.map(node => node.target).join(' | ')}`)"""


def test_the_page_is_light_and_asks_for_nothing_from_elsewhere():
    files = list(FIRST.iterdir())
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES
    page = (FIRST / "index.html").read_text(encoding="utf-8")
    for address in re.findall(r'(?:src|href)="([^"]*)"', page):
        assert not address.startswith(("http", "//")), address
    for address in re.findall(r'<(?:script|link)[^>]*(?:src|href)="([^":]+)"', page):
        assert (FIRST / address).is_file(), address
    for path in files:
        if path.suffix in {".css", ".js"}:
            assert not re.search(r"https?://|@import|url\(|fetch\(", path.read_text("utf-8")), path


@pytest.fixture(params=[(screen, scheme) for screen in SCREENS for scheme in ("light", "dark")])
def page(request, browser):
    """The page as a visitor has it; it must not complain, nor ask for anything else."""
    screen, scheme = request.param
    page = browser.new_page(viewport=SCREENS[screen], color_scheme=scheme)
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "console",
        lambda line: complaints.append(line.text) if line.type in {"error", "warning"} else None,
    )
    page.on(
        "request",
        lambda request: (
            complaints.append(request.url)
            if not request.url.startswith((FIRST.as_uri(), "data:"))
            else None
        ),
    )
    page.goto((FIRST / "index.html").as_uri())
    at_first = page.locator("#knobs-answer").inner_text()
    yield page
    assert complaints == []
    if page.locator("#knobs-answer").inner_text() != at_first:
        PICTURES.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=PICTURES / f"first_{screen}_{scheme}.png", full_page=True)
    page.close()


def move(page, name, value):
    """Put a slider somewhere, as a finger does."""
    page.get_by_role("slider", name=name).evaluate(
        "(one, value) => { one.value = value; one.dispatchEvent(new Event('input')); }", value
    )


def guess_and_compare(page, text):
    page.get_by_label("Your guess in percent").fill(text)
    page.get_by_role("button", name="Compare").click()
    return page.locator("#guess-answer").inner_text()


@pytest.mark.browser
def test_a_visitor_runs_guesses_watches_and_turns(page):
    page.get_by_role("button", name="Run it").click()
    page.wait_for_function(
        "document.querySelector('#loop-now').textContent.includes('in 10 s')", timeout=30_000
    )
    assert page.locator("#loop-lines div").all_inner_texts() == [
        f"batch {number}: waited 2.4 s, trained 0.1 s" for number in range(3)
    ]

    assert "You have not guessed yet" in guess_and_compare(page, "")
    assert "“a lot” is no number" in guess_and_compare(page, "a lot")
    assert "140 is not possible" in guess_and_compare(page, "140")
    assert page.locator("#guess-picture svg").count() == 0
    assert "You guessed 33.5 %. The GPU waits 96 %" in guess_and_compare(page, "33,5 %")
    assert page.locator("#guess-picture svg[role=img]").count() == 1

    page.get_by_label("Your guess, batches").first.fill("150")
    for letter, batches in (("a", 98), ("b", 296), ("c", 275)):
        case = page.locator(".case").nth("abc".index(letter))
        move(page, f"Time of case {letter}", 9)
        assert "batches in 9.0 s" in case.locator(".now").inner_text()
        assert case.locator(".answer").inner_text() == ""
        move(page, f"Time of case {letter}", 30)
        assert case.locator(".answer").inner_text().startswith(f"{batches} batches; ")
    assert "You guessed 150." in page.locator(".case .answer").first.inner_text()
    assert "not guessed yet" in page.locator(".case .answer").nth(1).inner_text()
    first_case = page.locator(".case").first
    first_case.get_by_role("button", name="Play").click()
    page.wait_for_timeout(1000)
    first_case.get_by_role("button", name="Pause").click()
    assert first_case.locator(".now").inner_text() != "98 batches in 30.0 s"

    answers = [page.locator("#knobs-answer").inner_text()]
    for name, value in (("Reads at once, a worker", 3), ("Order", 1), ("Workers", 16)):
        move(page, name, value)
        answers.append(page.locator("#knobs-answer").inner_text())
    works = [int(re.search(r"works (\d+)", answer)[1]) for answer in answers]
    # Two workers of eight streams gain a lot, any order some more, and many workers the rest.
    assert works == sorted(works)
    assert works[0] < 10
    assert works[-1] > 90
    assert page.locator("#knobs-picture path").count() == 17


@pytest.mark.browser
def test_nothing_runs_out_of_the_picture(page):
    guess_and_compare(page, "30")
    assert page.evaluate(FIND_OVERFLOW) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.browser
def test_axe_finds_no_violation(page):
    if not AXE.is_file():
        pytest.skip("no axe-core: npm install --prefix runs/npm axe-core")
    guess_and_compare(page, "30")
    page.add_script_tag(content=AXE.read_text(encoding="utf-8"))
    assert page.evaluate(FIND_VIOLATIONS) == []
