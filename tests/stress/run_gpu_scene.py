"""Run the notebooks that train on a GPU in the scene *my Drive, my GPU*, on a machine without one.

A tensor that is sent to the GPU stays where it is, and a tiny model takes the place of
torchvision's. The first run on a real GPU had shown three faults in cells that no other run
reaches.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tools.run_notebooks import run_demo

NOTEBOOKS = ("01_detect_bottleneck.ipynb", "05_compare_timings.ipynb")
STAND_IN = """
import torch
from torchvision.models import detection

from colab_utils.training.model import build_mask_rcnn
from colab_utils.course.workspace import Workspace

Workspace.emulated = False
torch.Tensor.cuda = lambda tensor: tensor
torch.nn.Module.cuda = lambda module: module
torch.cuda.synchronize = lambda: None


def build_tiny(num_classes):
    return build_mask_rcnn("maskrcnn_tiny_fpn", num_classes=num_classes, weights=None, min_size=64)


detection.maskrcnn_resnet50_fpn_v2 = build_tiny
"""


def add_stand_in(path: Path) -> None:
    """Add a cell that stands in for a GPU after the settings of a notebook."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = notebook["cells"]
    settings = next(
        number
        for number, cell in enumerate(cells)
        if "parameters" in cell["metadata"].get("tags", ())
    )
    cell = {**cells[settings], "id": "stand-in", "metadata": {}, "source": STAND_IN}
    cells.insert(settings + 1, cell)
    path.write_text(json.dumps(notebook), encoding="utf-8")


def main() -> int:
    """Return 0 where all cells ran; a cell that fails ends the run with its error."""
    source = Path(__file__).resolve().parents[2] / "notebooks"
    with TemporaryDirectory() as folder:
        copies = Path(folder, "notebooks")
        copies.mkdir()
        for name in NOTEBOOKS:
            add_stand_in(Path(shutil.copy(source / name, copies)))
        report = run_demo(
            Path(folder, "demo"), notebooks=copies, parameters={"SCENE": "my Drive, my GPU"}
        )
        print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
