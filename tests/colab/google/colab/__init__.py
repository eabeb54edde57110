"""A stand-in for the package that Colab brings, with its rules: googlecolab/colabtools 3c07d77,
April 2026. It has what Drive needs; a notebook that imports more of Colab's package stops here.

Nobody sits at a browser here. Whatever asks a person for something writes a ? to the file
COLAB_ASKED, and takes its answer from COLAB_ANSWER: ``granted``, ``declined`` or ``timeout``.
"""

from google.colab import drive

__all__ = ["drive"]
