"""Choices as values, as tables and with progress bars."""

from __future__ import annotations

from acnml.tuning import Choice, Judged


def test_a_choice_prints_its_rule_and_an_aligned_table():
    rows = (
        Judged(0.0, 0.98, 0.0712, 0.03, 0.004, True),
        Judged(0.25, 0.98, 0.08, 0.03, 0.01, True),
        Judged(10.0, 0.5, 12.3, 0.7, 0.2, False),
    )
    assert str(Choice(0.25, rows, "the largest that is harmless")) == (
        "0.25: the largest that is harmless\n"
        "   value  accuracy      nll   brier     ece  harmless\n"
        "       0    0.9800   0.0712  0.0300  0.0040       yes\n"
        "→   0.25    0.9800   0.0800  0.0300  0.0100       yes\n"
        "      10    0.5000  12.3000  0.7000  0.2000        no"
    )
