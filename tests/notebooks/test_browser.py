"""The notebooks as a reader has them: JupyterLab in a browser, *Run All* from the menu, every
slider dragged.

Each notebook is the file that `make workshop` hands out. It lies alone in an empty folder, and its
kernel runs where the package is not installed. `make test-browser` runs this; screenshots are left
in ``runs/browser``.
"""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.colab.environments import lay_over
from tests.notebooks.test_run_notebooks import TINY
from tools.cells import ROOT, write_workshop
from tools.run_notebooks import inject_parameters

pytestmark = [pytest.mark.browser, pytest.mark.timeout(3600)]
NAMES = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
PICTURES = ROOT / "runs" / "browser"
OVERRIDES = {
    # Every cell has to be in the page, also one that is out of sight.
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension:notification": {"checkForUpdates": False, "fetchNews": "false"},
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
}

COUNT_CELLS = """() => {
  const cells = [...document.querySelectorAll('.jp-CodeCell')]
    .filter(one => !one.querySelector('.jp-Placeholder'));
  const prompts = cells.map(one => one.querySelector('.jp-InputPrompt').textContent);
  return {
    done: prompts.filter(text => /[0-9]/.test(text)).length,
    waiting: prompts.filter(text => text.includes('*')).length,
    empty: prompts.filter(text => !/[0-9*]/.test(text)).length,
  };
}"""
FIND_ERRORS = """() => [...document.querySelectorAll(
    '[data-mime-type="application/vnd.jupyter.error"]')]
  .map(one => one.innerText)"""
READ_PICTURE = """handle => {
  const box = handle.closest('.widget-vbox, .jp-OutputArea');
  return [...box.querySelectorAll('img')].map(one => one.src).join() +
    [...box.querySelectorAll('.widget-html-content, svg')].map(one => one.innerHTML).join();
}"""
FIND_UNREADABLE = """() => {
  const parse = text => (text.match(/[0-9.]+/g) || []).map(Number);
  const light = colour => colour.slice(0, 3).map(c => c / 255)
    .map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, n) => sum + c * [0.2126, 0.7152, 0.0722][n], 0);
  const found = [];
  for (const area of document.querySelectorAll('.jp-OutputArea-output')) {
    const walker = document.createTreeWalker(area, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const text = walker.currentNode.textContent.trim();
      const owner = walker.currentNode.parentElement;
      if (!text || !owner.checkVisibility()) continue;
      if (owner.closest('style, script, title, defs')) continue;
      const style = getComputedStyle(owner);
      let colour = parse(owner instanceof SVGElement ? style.fill : style.color);
      let alpha = colour[3] ?? 1, ground = null, drawn = false;
      for (let one = owner; one; one = one.parentElement) {
        const its = getComputedStyle(one), fill = parse(its.backgroundColor);
        alpha *= Number(its.opacity);
        drawn ||= its.backgroundImage !== 'none';
        if ((fill[3] ?? 1) === 1 && fill.length) { ground = fill; break; }
      }
      if (drawn || !ground) continue;
      colour = colour.slice(0, 3).map((c, n) => alpha * c + (1 - alpha) * ground[n]);
      const [dim, bright] = [light(colour), light(ground)].sort((a, b) => a - b);
      const contrast = (bright + 0.05) / (dim + 0.05);
      if (contrast < 3) found.push(`${contrast.toFixed(2)}: ${text.slice(0, 60)}`);
    }
  }
  return found;
}"""


@pytest.fixture(scope="module")
def handed_out(tmp_path_factory):
    return write_workshop(tmp_path_factory.mktemp("workshop"))


@contextmanager
def serve(folder, files):
    """JupyterLab over a folder; its kernels run in a new environment that lacks the package."""
    kernel = {
        "argv": [
            str(lay_over(files / "environment", Path(sys.executable))),
            "-m",
            "ipykernel_launcher",
            "-f",
            "{connection_file}",
        ],
        "display_name": "Python 3",
        "language": "python",
    }
    for path, content in (
        ("kernels/python3/kernel.json", kernel),
        ("settings/overrides.json", OVERRIDES),
    ):
        (files / path).parent.mkdir(parents=True)
        (files / path).write_text(json.dumps(content))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "JUPYTER"))
    }
    variables |= {"JUPYTER_PATH": str(files), "IPYTHONDIR": str(files / "ipython")}
    variables |= {
        f"JUPYTER_{kind}_DIR": str(files / kind) for kind in ("CONFIG", "DATA", "RUNTIME")
    }
    options = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.root_dir": folder,
        "ServerApp.allow_root": True,
        "IdentityProvider.token": "",
        "ServerApp.disable_check_xsrf": True,
        "LabApp.app_settings_dir": files / "settings",
        "LabApp.user_settings_dir": files / "user",
        "LabApp.workspaces_dir": files / "workspaces",
        "LabApp.extension_manager": "readonly",
    }
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        *(f"--{key}={value}" for key, value in options.items()),
    ]
    with open(files / "server.log", "wb") as log:
        server = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 240
        while True:
            try:
                urllib.request.urlopen(f"{url}/api", timeout=60).close()
                break
            except OSError:
                assert server.poll() is None, (files / "server.log").read_text()
                assert time.monotonic() < until, (files / "server.log").read_text()
                time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@pytest.fixture(params=NAMES)
def opened(request, browser, handed_out, tmp_path):
    """The page of a notebook that lies alone in an empty folder, and what the browser's console
    says meanwhile.
    """
    # At the top, this import would take two seconds of every process that collects tests.
    import nbformat

    name = request.param
    folder = tmp_path / "alone"
    folder.mkdir()
    notebook = nbformat.read(
        next(path for path in handed_out if path.stem == name),
        as_version=4,
    )
    source = next(
        cell.source for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())
    )
    known = {node.targets[0].id for node in ast.parse(source).body if isinstance(node, ast.Assign)}
    inject_parameters(notebook, {key: value for key, value in TINY.items() if key in known})
    nbformat.write(notebook, folder / f"{name}.ipynb")
    messages = []
    with serve(folder, tmp_path / "files") as url:
        page = browser.new_page(viewport={"width": 1280, "height": 1600})
        page.on("pageerror", lambda error: messages.append(f"exception: {error}"))
        page.on(
            "console",
            lambda line: messages.append(f"console: {line.text}") if line.type == "error" else None,
        )
        page.on(
            "requestfailed",
            lambda asked: (
                messages.append(f"request: {asked.url}") if url not in asked.url else None
            ),
        )
        page.goto(f"{url}/lab/tree/{name}.ipynb?reset", timeout=180_000)
        wait_for_kernel(page, url)
        yield name, page, messages
        PICTURES.mkdir(parents=True, exist_ok=True)
        # The picture shows what was on the screen when a test failed.
        page.screenshot(path=PICTURES / f"{name}_end.png")
        page.close()


def wait_for_kernel(page, url, limit_s=240):
    """Until a kernel is connected and idle; JupyterLab asks which one where it has not found it in
    time.
    """
    until = time.monotonic() + limit_s
    while True:
        page.wait_for_timeout(1000)
        if page.locator(".jp-Dialog").count():
            page.locator(".jp-Dialog .jp-mod-accept").click()
        with urllib.request.urlopen(f"{url}/api/kernels", timeout=60) as answer:
            kernels = json.load(answer)
        if any(kernel["connections"] and kernel["execution_state"] == "idle" for kernel in kernels):
            break
        assert time.monotonic() < until, kernels
    page.wait_for_timeout(1000)


def click_menu(page, *labels):
    page.locator(".lm-MenuBar-itemLabel", has_text=labels[0]).first.click()
    for label in labels[1:]:
        item = page.locator(".lm-Menu-item", has=page.get_by_text(label, exact=True)).last
        item.hover()
        if label == labels[-1]:
            item.click()


def run_all(page, limit_s=1500):
    """*Run All Cells* from the menu; returns when all ran, and fails where one does not."""
    click_menu(page, "Run", "Run All Cells")
    page.wait_for_function(
        f"() => ({COUNT_CELLS})().waiting > 0 || ({FIND_ERRORS})().length", timeout=120_000
    )
    until = time.monotonic() + limit_s
    while (cells := page.evaluate(COUNT_CELLS))["waiting"]:
        assert time.monotonic() < until, f"{cells} after {limit_s} s"
        time.sleep(0.5)
    assert page.evaluate(FIND_ERRORS) == []
    assert cells["empty"] == 0
    assert cells["done"] > 5


def take_pictures(page, name):
    """The whole notebook, a screen at a time."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for old in PICTURES.glob(f"{name}_*.png"):
        old.unlink()
    pane = page.locator(".jp-WindowedPanel-outer").first
    height, step = pane.evaluate("one => [one.scrollHeight, one.clientHeight]")
    for number, top in enumerate(range(0, height, step)):
        pane.evaluate("(one, top) => { one.scrollTop = top; }", top)
        time.sleep(0.3)
        page.screenshot(path=PICTURES / f"{name}_{number:02d}.png")


def drag_sliders(page):
    """Drag each slider of the simulation; its picture must change. Answers how many there are."""
    handles = page.locator(".widget-slider .noUi-handle").all()
    for handle in handles:
        handle.scroll_into_view_if_needed()
        before = handle.evaluate(READ_PICTURE)
        box = handle.bounding_box()
        rail = handle.locator("xpath=ancestor::*[contains(@class, 'noUi-target')]").bounding_box()
        x = box["x"] + box["width"] / 2
        y = box["y"] + box["height"] / 2
        middle = rail["x"] + rail["width"] / 2
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x + (60 if x < middle else -60), y, steps=5)
        page.mouse.up()
        until = time.monotonic() + 120
        while handle.evaluate(READ_PICTURE) == before:
            assert time.monotonic() < until, f"slider {handles.index(handle)} changes nothing"
            time.sleep(0.1)
    return len(handles)


def drag_animations(page):
    """Drag each animation to two moments; answers how many there are."""
    roots = page.locator(".colab-sim").all()
    for root in roots:
        root.scroll_into_view_if_needed()
        slider = root.locator("input.time")
        messages = []
        for share in (0.25, 0.75):
            box = slider.bounding_box()
            slider.click(position={"x": share * box["width"], "y": box["height"] / 2})
            messages.append(
                (
                    root.locator(".count").inner_text(),
                    root.locator(".past").evaluate("one => one.style.clipPath"),
                )
            )
        assert messages[0][0] != messages[1][0]
        assert messages[0][1] != messages[1][1]
    return len(roots)


def test_all_cells_run_from_the_menu(opened):
    name, page, messages = opened
    run_all(page)
    sliders = drag_sliders(page)
    animations = drag_animations(page)
    if name.startswith("01"):
        assert sliders >= 3
        assert animations >= 3
    assert page.locator(".jp-OutputArea-output img, .jp-OutputArea-output svg").count() >= 2
    take_pictures(page, f"{name}_light")
    assert page.evaluate(FIND_UNREADABLE) == []
    if name.startswith("04"):
        # All cells run a second time in the same session.
        run_all(page)
    click_menu(page, "Settings", "Theme", "JupyterLab Dark")
    page.wait_for_selector("body[data-jp-theme-light=false]", timeout=120_000, state="attached")
    time.sleep(1)
    take_pictures(page, f"{name}_dark")
    assert page.evaluate(FIND_UNREADABLE) == []
    assert messages == []
