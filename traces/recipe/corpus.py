"""The text that the small models are trained on: Python's own library, and named files.

A text is a list of documents. Its last 5 % is held out of training, and so is every paragraph of
any text that shares 13 words in a row with what is held out.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics

HELD_OUT = 0.05  # share of a text's characters
SHINGLE = 13  # words; two paragraphs with that many in a row in common count as copies
LONG = 1000  # characters; a longer paragraph is cut into lines
# Folders that are not installed everywhere, written by programs, or tables rather than text.
LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "encodings",
    "pydoc_data",
}


@dataclass(frozen=True)
class Text:
    """One kind of text, divided into what is trained on and what is held out."""

    name: str
    train: tuple[str, ...]  # documents
    held: tuple[str, ...]  # documents: the last 5 %
    dropped: float  # share of the training part removed because it also stands in held-out text
    digest: str  # sha256 of the whole text, before that


def standard_library() -> dict[str, list[str]]:
    """Read the texts that come with Python: ``code`` and ``docs``.

    ``code`` is the library's source, one document per file; ``docs`` the docstrings of each file,
    and the topics that pydoc shows.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    code, docs = [], [topics[name] for name in sorted(topics)]
    for path in sorted(root.rglob("*.py")):
        if LEFT_OUT & set(path.relative_to(root).parts[:-1]):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            doc = docstrings(source)
        except (OSError, ValueError, SyntaxError):  # a file in another encoding, a template
            continue
        code += [source] if source.strip() else []
        docs += [doc] if doc else []
    return {"code": code, "docs": docs}


def docstrings(source: str) -> str:
    """Return the docstrings of a module and everything in it, in order, blank lines between."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old files
        tree = ast.parse(source)
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return "\n\n".join(doc for node in nodes if (doc := ast.get_docstring(node)))


def split(documents: list[str]) -> tuple[list[str], list[str]]:
    """Split off the last 5 % of the characters, at a line's start: (first part, last part)."""
    left = int(sum(map(len, documents)) * (1 - HELD_OUT))
    for i, document in enumerate(documents):
        if left < len(document):
            cut = document.rfind("\n", 0, left) + 1 or left
            first, last = [*documents[:i], document[:cut]], [document[cut:], *documents[i + 1 :]]
            return [d for d in first if d], [d for d in last if d]
        left -= len(document)
    return documents, []


def shingles(documents: Iterable[str]) -> set[int]:
    """Hash every run of 13 words, ignoring case and what stands between the words."""
    return {hash(run) for document in documents for run in _runs(_words(document))}


def without(document: str, held: set[int]) -> str:
    """Remove every paragraph that takes part in a run of words in ``held`` (hashes)."""
    spans = [match.span() for match in re.finditer(r"\w+", document)]
    runs = _runs([document[a:b].lower() for a, b in spans])
    hits = [i for i, run in enumerate(runs) if hash(run) in held]
    if not hits:
        return document
    touched = {spans[i + offset][0] for i in hits for offset in range(SHINGLE)}
    starts = iter(sorted(touched))
    word = next(starts)
    kept = []
    for first, last in pairwise(_edges(document)):
        while word is not None and word < first:
            word = next(starts, None)
        if word is None or word >= last:
            kept.append(document[first:last])
    return "".join(kept)


def corpus(files: Iterable[Path], leave_out: Iterable[Path]) -> tuple[list[Text], list[Text]]:
    """Return the texts to train on, and those of ``leave_out``, which are only held out.

    files: texts to train on beside those that come with Python.
    """
    whole = standard_library() | {kind(path): [path.read_text("utf-8")] for path in files}
    left = {path.name: [path.read_text("utf-8")] for path in leave_out}
    return prepare(whole, left)


def kind(path: Path) -> str:
    """Return the name of a file's text: the file name up to the first dot."""
    return path.name.partition(".")[0]


def prepare(
    whole: dict[str, list[str]], left: dict[str, list[str]]
) -> tuple[list[Text], list[Text]]:
    """Return `corpus` of texts already read, as documents by name."""
    parts = {name: split(documents) for name, documents in whole.items()}
    held = shingles(d for _, last in parts.values() for d in last)
    held |= shingles(d for documents in left.values() for d in documents)
    texts = []
    for name, (first, last) in parts.items():
        clean = [without(document, held) for document in first]
        dropped = 1 - sum(map(len, clean)) / max(1, sum(map(len, first)))
        train = tuple(document for document in clean if document.strip())
        texts.append(Text(name, train, tuple(last), dropped, _digest(whole[name])))
    only_held = [Text(name, (), tuple(d), 0.0, _digest(d)) for name, d in left.items()]
    return texts, only_held


def _edges(document: str) -> list[int]:
    """Return the offsets between paragraphs: blank lines, and in long paragraphs every line."""
    edges = [0]
    for end in [*(m.end() for m in re.finditer(r"\n\s*\n", document)), len(document)]:
        if end - edges[-1] > LONG:
            edges += [m.end() for m in re.compile("\n").finditer(document, edges[-1], end)]
        edges.append(end)
    return edges


def _words(document: str) -> list[str]:
    return re.findall(r"\w+", document.lower())


def _runs(words: list[str]) -> Iterable[tuple[str, ...]]:
    return zip(*(words[i:] for i in range(SHINGLE)), strict=False)


def _digest(documents: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(documents).encode()).hexdigest()
