"""docs/incidents.md and the incident traces name each other."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_incident_trace_is_in_the_table_and_every_named_trace_exists():
    page = (ROOT / "docs" / "incidents.md").read_text()
    named = set(re.findall(r"`([BL]\d+-[a-z0-9-]+)`", page))
    files = {path.stem for path in (ROOT / "tests" / "traces").glob("[BL][0-9]*.json")}
    assert named == files and len(files) > 80


def test_every_row_of_the_table_says_something():
    page = (ROOT / "docs" / "incidents.md").read_text()
    rows = [line for line in page.splitlines() if re.match(r"\| [BL]\d", line)]
    assert len(rows) > 80
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 3 and all(cells), row
