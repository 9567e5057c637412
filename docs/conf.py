"""The site: `pip install '.[docs]'`, then `sphinx-build -W docs build/docs`."""

import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "specdec"
author = "The specdec developers"
release = metadata.version("specdec-sdk")
extensions = ["myst_parser", "sphinx_copybutton", "symbols"]
myst_heading_anchors = 3
exclude_patterns = ["full-run.json"]
suppress_warnings = ["toc.not_included"]  # decisions: their index lists them, and the sidebar does not
html_theme = "furo"
html_title = f"specdec {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"
