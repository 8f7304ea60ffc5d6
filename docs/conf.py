"""The site of the documents: `make docs` writes it to build/site, with docs/index.html first.

Its source is the whole checkout, so each plugin has its documents in its own folder.
"""

from importlib.metadata import version as distribution_version
from pathlib import Path

project = "qnnfarm"
author = "the qnnfarm contributors"
copyright = "the qnnfarm contributors"  # noqa: A001 - Sphinx's name
version = release = distribution_version("qnnfarm")

extensions = ["myst_parser"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "qnnfarm"
html_show_copyright = False
root_doc = "docs/index"
include_patterns = ["*.md", "*/*.md", "plugins/*/*.md", "suites/models/*/*.md"]
exclude_patterns = [".*", "build", "tests"]
_root = Path(__file__).parents[1]
_folders = "|".join(path.name for path in (*_root.glob("*"), *_root.glob("plugins/*")))
# A link to a plugin that was removed is none.
nitpick_ignore_regex = [("myst", rf"((../)*plugins|..)/(?!({_folders}|\.\.)/)\w+/[\w-]+\.md(#.*)?")]
