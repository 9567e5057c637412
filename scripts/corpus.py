"""The training text: the standard library of the running CPython, as documents in a fixed order.

Every `*.py` file is one document; `pydoc_data/topics.py` gives one document of English prose per topic. The
text is under the licence of the Python Software Foundation.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

TOPICS_FILE = "pydoc_data/topics.py"
SKIPPED_FOLDERS = frozenset({"site-packages", "encodings"})  # not the library's; generated character tables
HELD_OUT_PER_MILLE = 20


@dataclass(frozen=True)
class Document:
    name: str  # path below the library's root, with `::topic` appended for a topic
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the document is for validation only: decided by its name, so never by order or version.

        Topics quote each other, so none of them is ever held out.
        """
        if self.name.startswith(TOPICS_FILE):
            return False
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4]) % 1000 < HELD_OUT_PER_MILLE


@dataclass(frozen=True)
class Corpus:
    train: tuple[Document, ...]
    held_out: tuple[Document, ...]

    @property
    def sha256(self) -> str:
        """The fingerprint of names and texts: two runs with the same one saw the same text."""
        digest = hashlib.sha256()
        for document in (*self.train, *self.held_out):
            digest.update(f"{document.name}\0{document.text}\0".encode())
        return digest.hexdigest()


def load_corpus(root: Path | None = None) -> Corpus:
    """The corpus below `root` (default: the running interpreter's standard library)."""
    library = root if root is not None else Path(sysconfig.get_path("stdlib"))
    documents = list(_without_duplicates(_documents(library)))
    return Corpus(
        train=tuple(document for document in documents if not document.held_out),
        held_out=tuple(document for document in documents if document.held_out),
    )


def _documents(library: Path) -> Iterator[Document]:
    for path in sorted(library.rglob("*.py"), key=lambda path: path.relative_to(library).parts):
        relative = path.relative_to(library)
        if relative.as_posix() == TOPICS_FILE or SKIPPED_FOLDERS & set(relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # test data in other encodings
            continue
        yield Document(relative.as_posix(), text)
    for topic, text in sorted(topics.items()):
        yield Document(f"{TOPICS_FILE}::{topic}", text)


def _without_duplicates(documents: Iterable[Document]) -> Iterator[Document]:
    seen: set[str] = set()
    for document in documents:
        if document.text.strip() and document.text not in seen:
            seen.add(document.text)
            yield document
