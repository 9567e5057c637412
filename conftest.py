"""The Python of README and docs runs as tests."""

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

PAGES = ["README.md", "docs/*.md", "docs/*/*.md"]

pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser()], patterns=PAGES).pytest()
