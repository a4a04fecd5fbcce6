"""What a download from the Hugging Face hub leaves beside its files: revision and hashes.

Two layouts are known. In the hub's cache (`.../models--ORG--NAME/snapshots/REVISION/`) a file is a
link to a blob that is named by its sha256. A download into a folder leaves
`.cache/huggingface/download/FILE.metadata`: the revision, the sha256, the time.
"""

from __future__ import annotations

import re
from pathlib import Path

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SNAPSHOT = re.compile(r"models--(?P<repository>[^/]+)/snapshots/(?P<revision>[0-9a-f]{40})$")


def expected_sha256(path: Path) -> str | None:
    """The hub's sha256 of a large file, if the download left it; None otherwise."""
    if path.is_symlink() and _SHA256.fullmatch(blob := path.readlink().name):
        return blob
    lines = _metadata(path)
    return lines[1] if len(lines) > 1 and _SHA256.fullmatch(lines[1]) else None


def provenance(folder: Path) -> dict[str, str]:
    """Repository and revision, as far as they are known."""
    if match := _SNAPSHOT.search(str(folder.absolute())):
        repository = match["repository"].replace("--", "/", 1)
        return {"repository": repository, "revision": match["revision"]}
    lines = _metadata(folder / "config.json")
    return {"revision": lines[0]} if lines else {}


def _metadata(path: Path) -> list[str]:
    file = path.parent / ".cache" / "huggingface" / "download" / f"{path.name}.metadata"
    return file.read_text("utf-8", errors="replace").splitlines() if file.is_file() else []
