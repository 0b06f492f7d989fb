"""The API reference, made from the docstrings: `make docs` writes build/docs/index.html. Warnings are errors there."""

import flatparam

project = "flatparam"
author = copyright = "flatparam contributors"
version = release = flatparam.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "alabaster"
html_show_copyright = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
