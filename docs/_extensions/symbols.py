"""Public names on the pages of reference get an anchor, an entry of the general index, and one of objects.inv.

`contract-in-full.html#specdec.sdk.Needs.history` is a link. The pages stay Markdown: a name is a heading of the third
level, a member is what its table or its list begins with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

PACKAGES = {
    "reference/contract-in-full": "specdec.sdk",
    "reference/hooks": "specdec.sdk",
    "reference/engine": "specdec",
}
OF_MANY_PACKAGES = "reference/helpers"  # its headings of the second level are their names
MEMBER = re.compile(r"[a-z]\w*")


class Symbols(SphinxTransform):
    """Before the domains read what a page has."""

    default_priority = 500

    def apply(self, **kwargs: Any) -> None:
        """Name the sections of one page."""
        page = self.env.docname
        for section in self.document.findall(nodes.section):
            title, above = section[0].astext(), section.parent
            package = PACKAGES.get(page) or (page == OF_MANY_PACKAGES and above[0].astext())
            if package and title.isidentifier() and isinstance(above.parent, nodes.section):
                self._name(section, f"{package}.{title}", f"{title} (in {package})")
                for member, place in _members(section):
                    self._name(place, f"{package}.{title}.{member}", f"{member} ({package}.{title})")

    def _name(self, place: nodes.Element, name: str, entry: str) -> None:
        place["ids"].append(name)
        place.insert(1 if isinstance(place, nodes.section) else 0, _index(entry, name))
        self.env.domains.python_domain.note_object(name, "attribute" if name[-1].islower() else "class", name)


def _index(entry: str, name: str) -> nodes.Element:
    return addnodes.index(entries=[("single", entry, name, "", None)])


def _members(section: nodes.section) -> Iterator[tuple[str, nodes.Element]]:
    """Names of fields and methods, and the table cells or list items that begin with them."""
    for part in section.children:
        cells = [row[0] for row in part.findall(nodes.row)] if isinstance(part, nodes.table) else []
        items = list(part.children) if isinstance(part, nodes.bullet_list) else []
        for place in (*cells, *items):
            literal = next(place.findall(nodes.literal), None)
            name = MEMBER.match(literal.astext()) if literal is not None else None
            if name is not None:
                yield name[0], place


def setup(app: Sphinx) -> dict[str, bool]:
    """For Sphinx."""
    app.add_transform(Symbols)
    return {"parallel_read_safe": True}
