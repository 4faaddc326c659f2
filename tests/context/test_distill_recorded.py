"""Real long outputs, whole: each is understood as what it is, and reduced."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsteward.context.distill.base import Hints
from kvsteward.context.distill.meter import pieces
from kvsteward.context.distill.registry import distil

OUTPUTS = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "tool_outputs"
KINDS = {
    "azure_code.csv": "table",
    "support_matrix.csv": "table",
    "dpkg_l.txt": "table",
    "git_diff_mooncake.diff": "diff",
    "html_python_os.html": "html",
    "npm_view_react_time.json": "json",
    "openapi_inspect.json": "json",
    "tau_retail_products.json": "json",
    "xxd_png.txt": "blob",
}


@pytest.mark.shared_data
@pytest.mark.parametrize("name", KINDS)
def test_recorded_output(name: str) -> None:
    path = OUTPUTS / name
    if not path.is_file():
        pytest.skip("needs the recorded outputs beside the repository: ../shared/data/tool_outputs")
    found = distil(path.read_text(errors="replace"), 800, Hints(question="What does this output say?"), pieces)
    assert found.kind == KINDS[name]
    assert 400 <= pieces(found.text) <= 800
