"""A choice as text."""

from __future__ import annotations

from acnml.tuning import Choice, Scores


def test_a_choice_prints_its_rule_and_an_aligned_table():
    rows = (
        Scores(0.0, 0.98, 0.0712, 0.03, 0.004),
        Scores(0.25, 0.98, 0.08, 0.03, 0.01),
        Scores(10.0, 0.5, 12.3, 0.7, 0.2),
    )
    assert str(Choice(0.25, rows, "the largest that is harmless")) == (
        "0.25: the largest that is harmless\n"
        "   value  accuracy      nll   brier     ece\n"
        "       0    0.9800   0.0712  0.0300  0.0040\n"
        "→   0.25    0.9800   0.0800  0.0300  0.0100\n"
        "      10    0.5000  12.3000  0.7000  0.2000"
    )
