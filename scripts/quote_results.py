"""Write what docs/results/ holds into the headers of the recipes and the table of the README.

    python scripts/quote_results.py [--check]

A recipe's `# measured:` line is rewritten where docs/results/<recipe>/ has a run, and a row of the README whose first
cell links to a folder of docs/results/. --check writes nothing and exits with 1 where a line is not what the results say.
"""

import re
import sys
from pathlib import Path

from qat.report.quote import accuracies, kept_results, number, quote

ROOT = Path(__file__).parents[1]
MEASURED = re.compile(r"^# measured: float .*$", re.MULTILINE)
ROW = re.compile(r"^\| (?P<first>\[`[^|]*\]\(docs/results/(?P<name>\w+)\)[^|]*) \|.*$", re.MULTILINE)  # of the README: first cell, the rest


def main(check: bool) -> int:
    stale = []
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        text = path.read_text()
        results = kept_results(ROOT / "docs" / "results" / path.stem)
        if results and MEASURED.search(text):
            write(path, MEASURED.sub(f"# measured: {quote(results)}", text), stale, check)
    readme = ROOT / "README.md"
    write(readme, ROW.sub(lambda row: f"| {row['first']} | {cells(row['name'])} |", readme.read_text()), stale, check)
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'differs from docs/results' if check else 'written'}")
    return int(check and bool(stale))


def cells(name: str) -> str:
    """What a row of the README says after its first cell: accuracies and seeds of docs/results/<name>."""
    results = kept_results(ROOT / "docs" / "results" / name)
    found = accuracies(results)
    seeds = ", ".join(str(result["seed"]) for result in results)
    lsb = max(result["parity"]["max_lsb"] for result in results)
    return " | ".join([*(number(found[key]) for key in ("float", "ptq", "fake_quant", "integer")), seeds, str(lsb)])


def write(path: Path, text: str, stale: list[Path], check: bool) -> None:
    """Note the file where its text is another, and write it unless only asked."""
    if text != path.read_text():
        stale.append(path)
        if not check:
            path.write_text(text)


if __name__ == "__main__":
    raise SystemExit(main("--check" in sys.argv[1:]))
