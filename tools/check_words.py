"""Find words that the style guide rules out. `make lint` runs this on the code and the documents.

Usage: python tools/check_words.py [PATH ...]. Prints `file:line: word` and exits with 1 if it finds one.
docs/glossary.md names the words to use instead.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("src", "tests", "docs", "examples", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile")
SUFFIXES = {".py", ".md", ".toml", ".yml", ".ipynb", ""}
SKIPPED = {"tools/check_words.py", "docs/glossary.md"}  # they name the words in order to rule them out
WORDS = (
    # pronouns and old-fashioned adverbs
    r"nobody", r"somebody", r"everybody", r"anybody", r"whoever", r"whom", r"anew", r"as ever", r"ever after",
    r"thereby", r"whereof", r"thereof", r"hereby", r"lest", r"of late", r"in its stead", r"in their stead",
    r"of one's own", r"so many", r"so often", r"(?:is|are|was|were|be) told", r"(?:comes?|came) along", r"by heart",
    # metaphors for parts of the program
    r"hangars?", r"fellows?", r"glimpses?", r"purse", r"trunks?", r"urns?", r"crowds?", r"glances?", r"under one roof",
    r"what (?:it|they|the \w+) (?:thinks?|thought|says?|said)", r"thoughts",
    # names that the field has other words for
    r"heat", r"said", r"seats?",
)  # fmt: skip
PATTERN = re.compile(r"(?<![\w-])(?:" + "|".join(WORDS) + r")(?![\w-])", re.IGNORECASE)


def files(paths: list[str]) -> Iterator[Path]:
    """The text files under the paths, without data and caches."""
    for name in paths or PLACES:
        path = Path(name) if paths else ROOT / name
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (file for file in found if file.is_file() and file.suffix in SUFFIXES)


def hits(text: str) -> Iterator[tuple[int, str]]:
    """(line number, word) of every word of the list."""
    for number, line in enumerate(text.splitlines(), 1):
        for match in PATTERN.finditer(line):
            yield number, match.group()


def main(paths: list[str]) -> int:
    found = 0
    for file in files(paths):
        name = file.resolve().relative_to(ROOT).as_posix() if file.resolve().is_relative_to(ROOT) else str(file)
        if name in SKIPPED or ("/results/" in name and file.suffix != ".md"):
            continue
        for number, word in hits(file.read_text("utf-8")):
            found += 1
            print(f"{name}:{number}: {word}")
    print(f"{found} hits of the word list")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
