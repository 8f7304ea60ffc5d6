"""The site of the documents: `make docs` writes it to build/docs."""

from importlib.metadata import version as distribution_version

project = "qnnfarm"
author = "the qnnfarm contributors"
copyright = "the qnnfarm contributors"  # noqa: A001 - Sphinx's name
version = release = distribution_version("qnnfarm")

extensions = ["myst_parser"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "qnnfarm"
html_show_copyright = False
exclude_patterns = ["conf.py"]
