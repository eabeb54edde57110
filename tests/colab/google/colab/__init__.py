"""A stand-in for the package that Colab brings, with its rules: googlecolab/colabtools 3c07d77,
April 2026. It has what Drive needs; a notebook that imports more of Colab's package stops here.

Nobody sits at a browser here. Whatever asks a person for something writes the question to the file
COLAB_ASKED, and takes its answer from COLAB_ANSWER: ``granted``, ``declined`` or ``timeout``.
"""

from google.colab import drive, errors

__all__ = ["drive", "errors"]
