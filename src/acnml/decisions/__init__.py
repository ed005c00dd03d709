"""From calibrated probabilities to decisions: when to abstain, how accurate, has something changed?

Every part rests on `Outcomes`: answers for labelled data that the classifier was not trained on.
What follows from them holds for new data that are drawn like these, and **not under shift**.
"""

from acnml.decisions.accuracy import AccuracyEstimate, expected_accuracy
from acnml.decisions.monitor import Monitor, Observed, Window
from acnml.decisions.outcomes import By, Outcomes
from acnml.decisions.thresholds import (
    Abstention,
    Certificate,
    abstention,
    at_least_coverage,
    at_most_risk,
)

__all__ = [
    "Abstention",
    "AccuracyEstimate",
    "By",
    "Certificate",
    "Monitor",
    "Observed",
    "Outcomes",
    "Window",
    "abstention",
    "at_least_coverage",
    "at_most_risk",
    "expected_accuracy",
]
