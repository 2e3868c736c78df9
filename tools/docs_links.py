"""A hook of mkdocs: links from docs/ to files of the repository become links to its web page.

A link to a file that does not exist stays as it is, so that `make docs` fails (strict mode).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)((?:#[^)\s]*)?)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """The page's markdown with links that leave docs/ pointed at the repository's web page."""
    docs = Path(config["docs_dir"])
    folder = (docs / page.file.src_uri).parent
    excluded = (".sh", ".py")

    def replaced(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / match[1]))
        inside = target.is_relative_to(docs) and target.suffix not in excluded
        if inside or not target.exists():
            return match[0]
        kind = "tree" if target.is_dir() else "blob"
        return f"]({config['repo_url']}/{kind}/main/{target.relative_to(docs.parent).as_posix()}{match[2]})"

    return LINK.sub(replaced, markdown)
