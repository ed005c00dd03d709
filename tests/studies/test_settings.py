"""Settings from the command line: every form, and every way to get it wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Optional

import pytest

from studies.settings import SettingError, override, preset, setting_names


@dataclass(frozen=True)
class Training:
    epochs: int = 10
    learning_rate: float = 0.1
    warm: bool = False


@dataclass(frozen=True)
class Study:
    training: Training = field(default_factory=Training)
    angles: tuple[int, ...] = (0, 90)
    names: tuple[str, ...] = ()
    rates: tuple[float, ...] = (0.5,)
    network: str = "mlp"
    subset: int | None = None
    limit: Optional[float] = None  # noqa: UP045, the older way to write it
    fisher: Literal["exact", "empirical"] = "exact"
    low: int = 0
    high: int = 10
    solver: Any = None
    computed: int = field(init=False, default=3)

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"low {self.low} must be below high {self.high}")


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        ([], Study()),
        (["low = 3 "], Study(low=3)),
        (["low=15", "high=20"], Study(low=15, high=20)),  # only together
        (["low=1", "low=2"], Study(low=2)),
        (
            ["training.warm=true", "training.learning_rate=1e-3"],
            Study(training=Training(learning_rate=0.001, warm=True)),
        ),
        (["angles=0,15, 30"], Study(angles=(0, 15, 30))),
        (["angles=45"], Study(angles=(45,))),
        (["angles="], Study(angles=())),
        (["rates=1,2.5"], Study(rates=(1.0, 2.5))),
        (["names=a,b=c"], Study(names=("a", "b=c"))),
        (["subset=5"], Study(subset=5)),
        (["subset=none"], Study()),
        (["limit=inf"], Study(limit=float("inf"))),
        (["fisher=empirical"], Study(fisher="empirical")),
    ],
)
def test_text_becomes_what_the_field_is(assignments, expected):
    study = override(Study(), assignments)
    assert study == expected
    assert [type(rate) for rate in study.rates] == [float] * len(study.rates)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("low", "'low' is not a setting; write name=value"),
        ("epochs=3", "there is no setting 'epochs'; did you mean training.epochs?"),
        ("zzz=3", "there is no setting 'zzz'; there are training.epochs, training.learning_rate"),
        ("training=3", "there is no setting 'training'"),
        ("computed=4", "there is no setting 'computed'"),
        ("low=3.5", "low must be a whole number, not '3.5'"),
        ("training.warm=yes", "training.warm must be true or false, not 'yes'"),
        ("fisher=mc", "fisher must be exact or empirical, not 'mc'"),
        ("subset=all", "subset must be a whole number, or none, not 'all'"),
        ("angles=0;15", "angles must be values with commas between them, each a whole number"),
        ("low=12", "with low set so: low 12 must be below high 10"),
    ],
)
def test_errors_name_the_setting_and_what_is_allowed(assignment, message):
    with pytest.raises(SettingError) as error:
        override(Study(), [assignment])
    assert message in str(error.value)


def test_names_are_those_that_can_be_set():
    assert list(setting_names(Study())) == [
        *("training.epochs", "training.learning_rate", "training.warm"),
        *("angles", "names", "rates", "network", "subset", "limit", "fisher", "low", "high"),
    ]


def test_presets_are_found_by_name():
    presets = {"quick": Study(high=20), "full": Study(high=30)}
    assert preset(presets, "full").high == 30
    with pytest.raises(SettingError, match="there is no preset 'fast', only quick, full"):
        preset(presets, "fast")
