"""Guides and API reference in one site: `make docs` writes build/docs/docs/index.html. Warnings are errors there."""

from typing import Any

from pygments.lexers.special import TextLexer

import flatparam

project = "flatparam"
author = copyright = "flatparam contributors"
version = release = flatparam.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser"]
# The source folder is that of the repository, as pages link to its other Markdown files
root_doc = "docs/index"
include_patterns = ["docs/**", "*.md", "csrc/*.md", "examples/*.md", "tests/*.md", "tests/upstream/*.md"]
exclude_patterns = ["build", ".venv"]
suppress_warnings = ["toc.not_included", "myst.xref_missing"]  # links to folders and scripts; a test checks links
myst_heading_anchors = 3  # as on GitHub
html_theme = "alabaster"
html_theme_options = {"page_width": "1100px"}  # wide tables
html_show_copyright = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True


def setup(app: Any) -> None:
    app.add_lexer("mermaid", TextLexer)
