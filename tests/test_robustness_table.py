"""Every test that docs/robustness.md names exists, and every row names one."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [line for line in (ROOT / "docs" / "robustness.md").read_text().splitlines() if line.startswith("| ")]
ROWS = [row for row in ROWS if not row.startswith(("| situation |", "| gate |"))]
NAMED = sorted(set(re.findall(r"`(tests/\S+?)`", "\n".join(ROWS))))


def test_every_row_names_a_test():
    assert len(ROWS) > 45 and all("`tests/" in row for row in ROWS)


@pytest.mark.parametrize("file", sorted({name.split("::")[0] for name in NAMED}))
def test_the_tests_it_names_exist(file):
    defined = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}
    wanted = {name.split("::")[1] for name in NAMED if name.startswith(f"{file}::")}
    assert wanted <= defined, wanted - defined
