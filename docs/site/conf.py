"""How Sphinx builds the site: `make site` puts this file beside the texts and the notebooks."""

project = "colab_utils"
author = "the authors of colab_utils"
project_copyright = "texts and notebooks CC BY 4.0, code Apache-2.0"
language = "en"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# `bytes` is a type and a field of seven results: a type is not linked. Some texts begin at a third
# heading below the first.
suppress_warnings = ["ref.python", "myst.header"]
# The first page is written by hand, and takes the name index.html.
root_doc = "contents"

# The notebooks come with their results.
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

default_role = "code"
autodoc_member_order = "bysource"
# Matplotlib gives each figure a `set` of its own, whose text only Matplotlib's site can show; the
# text of a store describes its `guard`.
autodoc_default_options = {"exclude-members": "set, guard"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Each method raises", "params_style")]

html_theme = "furo"
html_title = "colab_utils"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_show_sphinx = False
html_copy_source = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
