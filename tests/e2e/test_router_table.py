"""docs/routers.md lists every test of a row, and every row has its test: neither can be dropped alone."""

import ast
import pathlib
import re

HERE = pathlib.Path(__file__).parent
PAGE = (HERE.parent.parent / "docs" / "routers.md").read_text()
ROWS = re.findall(r"^\| ([\d.]+) \| .+ \| `(test_\w+)` \|$", PAGE, re.M)
# The rows of facts/router §0 are ten, those of §3 four sections; §9 is one table.
SECTIONS = [*(f"0.{i}" for i in range(1, 11)), *(f"3.{i}" for i in range(1, 5)), "9"]


def row_tests():
    for path in HERE.glob("test_router_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and re.match(r"test_\d", node.name):
                yield node.name


def test_every_row_has_a_test_and_every_test_a_row():
    listed = [name for _, name in ROWS]
    assert len(set(listed)) == len(listed)
    assert sorted(row_tests()) == sorted(listed)


def test_a_test_is_named_after_its_row():
    for number, name in ROWS:
        assert name.startswith(f"test_{number.replace('.', '_')}_"), (number, name)


def test_every_section_is_covered():
    assert set(SECTIONS) <= {number for number, _ in ROWS}


def test_every_line_of_a_table_is_read():
    """A row that the pattern above does not match would be held by nothing."""
    lines = [line for line in PAGE.splitlines() if re.match(r"\| [\d]", line)]
    assert len(lines) == len(ROWS) > 50
