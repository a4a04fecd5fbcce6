"""The inputs of the corpus: package names, pinned versions and the lock file.

``python3 tiny/sources.py`` downloads every input that ``sources.json`` pins and checks its hash.
``python3 tiny/sources.py --lock`` writes ``sources.json`` from what lies in ``work/packages``.
Only inputs under permissive licences (PSF, MIT, BSD, Apache-2.0, ISC, HPND, public domain) are
listed; the licence texts of all of them travel with the weights.
"""

import argparse
import email
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from paths import PACKAGES, SOURCES

DEBIAN = ("python3.11-doc", "sqlite3-doc")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def wheel_metadata(path: Path) -> tuple[str, str, str, dict[str, str]]:
    """Name, version, licence statement and licence files of a wheel."""
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        root = next(n for n in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
        meta = email.message_from_bytes(wheel.read(root))
        info = root.split("/")[0] + "/"
        texts = {
            n[len(info) :]: wheel.read(n).decode("utf-8", "replace")
            for n in names
            if n.startswith(info) and re.search(r"(licen[cs]e|copying|notice)", n, re.I)
        }
    statement = meta.get("License-Expression") or ""
    classifiers = [c for c in meta.get_all("Classifier", []) if c.startswith("License ::")]
    if not statement and classifiers:
        statement = "; ".join(c.split(" :: ")[-1] for c in classifiers)
    if not statement:
        statement = (meta.get("License") or "UNKNOWN").strip().splitlines()[0][:100]
    return meta["Name"], meta["Version"], statement, texts


def lock() -> None:
    entries = []
    for path in sorted(PACKAGES.iterdir()):
        if path.suffix == ".whl":
            name, version, licence, _ = wheel_metadata(path)
            kind = "pypi"
        elif path.suffix == ".deb":
            name, version = path.name.split("_")[:2]
            licence = {"python3.11-doc": "PSF-2.0", "sqlite3-doc": "public domain"}[name]
            kind = "debian"
        else:
            continue
        entries.append(
            {
                "kind": kind,
                "name": name,
                "version": version,
                "licence": licence,
                "file": path.name,
                "sha256": sha256(path),
            }
        )
    SOURCES.write_text(json.dumps(entries, indent=1) + "\n")
    print(f"{len(entries)} inputs locked")


def download() -> None:
    PACKAGES.mkdir(parents=True, exist_ok=True)
    for entry in json.loads(SOURCES.read_text()):
        path = PACKAGES / entry["file"]
        if not path.exists():
            if entry["kind"] == "debian":
                command = ["apt-get", "download", f"{entry['name']}={entry['version']}"]
            else:
                command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
                command += ["--only-binary=:all:", f"{entry['name']}=={entry['version']}"]
            subprocess.run(command, check=True, cwd=PACKAGES)
        if sha256(path) != entry["sha256"]:
            raise ValueError(f"{path}: sha256 differs from {SOURCES.name}; delete it and retry")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lock", action="store_true")
    lock() if parser.parse_args().lock else download()
