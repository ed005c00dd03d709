"""What the tests of scoring share: one calibrated network, and a job for it."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> dict[str, str]:
    from scored import calibrated_files  # needs the extra `predict`

    return calibrated_files(tmp_path_factory.mktemp("model"))


@pytest.fixture
def job(files, tmp_path):
    from acnml.scoring import Job

    paths = {"input": str(tmp_path / "data.parquet"), "output": str(tmp_path / "scored")}
    return Job(**files, **paths, part_rows=50, batch_rows=16)
