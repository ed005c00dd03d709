"""The code of the how-to pages runs as it is printed there."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib
import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.filterwarnings("ignore:The price of")
@pytest.mark.parametrize("page", ["howto/sklearn.md", "howto/plots.md", "howto/conformal.md"])
def test_the_code_runs(page, monkeypatch, tmp_path):
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    assert blocks


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
