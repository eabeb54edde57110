"""Run a notebook in place, in the folder that this starts in: ``python execute.py NOTEBOOK``."""

import os
import sys

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

notebook = nbformat.read(sys.argv[1], as_version=4)
client = NotebookClient(
    notebook,
    timeout=900,
    kernel_name="python3",
    resources={"metadata": {"path": os.getcwd()}},
    allow_errors=False,
)
try:
    client.execute()
except CellExecutionError as error:
    print(error.ename, error.evalue, sep=": ")
    sys.exit(1)
finally:
    nbformat.write(notebook, sys.argv[1])
