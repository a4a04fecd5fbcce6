"""Collects the inputs' licence texts into ``kimi_jax/assets/tiny-k2/LICENSES/``.

One file an input; the Apache License, which many share word for word, is kept once.
"""

import json
import re
import sysconfig
from pathlib import Path

from paths import ASSETS, PACKAGES, SOURCES, WORK
from sources import wheel_metadata

FOLDER = ASSETS / "LICENSES"
LONGEST = 14_000  # longer files list the licences of bundled libraries, which the corpus leaves out
SEE_APACHE = "Apache License, Version 2.0: see Apache-2.0.txt\n"


def is_apache(text: str) -> bool:
    return bool(re.search(r"Apache License\s+Version 2\.0, January 2004", text)) and (
        "END OF TERMS AND CONDITIONS" in text
    )


def main_files(texts: dict[str, str]) -> list[str]:
    """The licence files of the package itself: the least deep ones, no vendored libraries'."""
    names = [n for n in texts if not re.search(r"vendor|bundled|third|extern|/lib/", n, re.I)]
    depth = min((n.count("/") for n in names), default=0)
    return sorted(n for n in names if n.count("/") == depth)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    missing = []
    for entry in json.loads(SOURCES.read_text()):
        path = PACKAGES / entry["file"]
        parts = [f"{entry['name']} {entry['version']} ({entry['licence']})\n"]
        if entry["kind"] == "pypi":
            texts = wheel_metadata(path)[3]
            for name in main_files(texts):
                text = texts[name].strip() + "\n"
                if is_apache(text):
                    (FOLDER / "Apache-2.0.txt").write_text(text)
                    text = SEE_APACHE
                if len(text) > LONGEST:
                    text = text[:LONGEST] + "\n[bundled libraries' licences left out]\n"
                parts.append(text)
            if len(parts) == 1:
                missing.append(f"{entry['name']}: {entry['licence']}")
        else:
            root = WORK / "unpacked" / entry["name"]
            parts.append(next(root.rglob("copyright")).read_text("utf-8", "replace"))
        (FOLDER / f"{entry['name']}.txt").write_text("\n".join(dict.fromkeys(parts)))
    stdlib = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
    (FOLDER / "python-stdlib.txt").write_text(stdlib.read_text())
    print("no licence file inside:", missing)


if __name__ == "__main__":
    main()
