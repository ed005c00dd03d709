"""A calibrated network in files, for the tests of scoring."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    from scored import calibrated_files

    return calibrated_files(tmp_path_factory.mktemp("model"))
