"""Averages the model before and after the closing phase, and likewise the two drafters.

    python3 tiny/average.py --before FOLDER --after FOLDER --target 0.5 --drafter 0.75

Weight averaging along one fine-tuning run (Wortsman et al. 2022): half-way keeps most of what the
closing phase taught (few loops, answers that parse) and most of the drafter's accuracy, which was
trained longer before it. The average is packed anew: routed experts are rounded to INT4 again.
"""

import argparse
from pathlib import Path

import export
import export_drafter
from paths import ASSETS


def between(before: dict, after: dict, share: float) -> dict:
    return {name: before[name] + share * (after[name] - before[name]) for name in before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, required=True)
    parser.add_argument("--target", type=float, default=0.5, help="share of `after`")
    parser.add_argument("--drafter", type=float, default=0.75)
    parser.add_argument("--folder", type=Path, default=ASSETS)
    args = parser.parse_args()
    params = between(export.read(args.before), export.read(args.after), args.target)
    drafts = between(
        export_drafter.read(args.before), export_drafter.read(args.after), args.drafter
    )
    export.write(params, args.folder)
    export.check(params, args.folder)
    export_drafter.write(drafts, args.folder)


if __name__ == "__main__":
    main()
