"""Check the types of the playground's page with `tsc --checkJs`, where Node and typescript are present.

typescript comes from `make pagetools`, or from the path. The page itself needs no build step.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "src" / "paceline" / "serve" / "page"
FETCHED = ROOT / "build" / "page" / "node_modules" / "typescript" / "lib" / "tsc.js"
OPTIONS = ("--noEmit", "--allowJs", "--checkJs", "--strict", "--target", "es2022", "--module", "es2022",
           "--moduleResolution", "bundler", "--lib", "es2023,dom,dom.iterable,dom.asynciterable")  # fmt: skip


def compiler() -> list[str] | None:
    """Return the command of the type checker, or None."""
    node, tsc = shutil.which("node"), shutil.which("tsc")
    if node is not None and FETCHED.exists():
        return [node, str(FETCHED)]
    return [tsc] if node is not None and tsc is not None else None


def main() -> int:
    command = compiler()
    if command is None:
        print("The types of the page are not checked: Node or typescript is missing (make pagetools).")
        return 0
    return subprocess.run([*command, *OPTIONS, str(PAGE / "app.js")], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
