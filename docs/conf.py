"""The site: `pip install '.[docs]'`, then `sphinx-build -W docs build/docs`."""

project = "specdec"
author = "The specdec developers"
extensions = ["myst_parser"]
myst_heading_anchors = 3
exclude_patterns = ["full-run.json"]
html_theme = "furo"
html_title = "specdec"
