"""Choose alpha, prior precision and temperature on a held-out validation set.

The prior precision can also be chosen by the evidence, which needs no validation data.

Most functions return a `Choice`: the value, the table of all values that were tried, and the rule.
Print it to see all three. For other hyperparameters, `within_price` chooses the most cautious value
that increases the NLL by at most a given price. A value is more cautious than another if its
predictions are less confident.

Two functions return something else: `sweep` a table of scores, `most_cautious` a number.
"""

from acnml.tuning.alpha import (
    ALPHAS,
    PAPERS_ALPHAS,
    Judged,
    Match,
    Tolerance,
    alpha_by_nll,
    alpha_matching_cnml,
    largest_harmless_alpha,
)
from acnml.tuning.choice import Choice
from acnml.tuning.price import most_cautious, within_price
from acnml.tuning.prior_precision import (
    PRIOR_PRECISIONS,
    Evidence,
    prior_precision_by_evidence,
    prior_precision_by_nll,
)
from acnml.tuning.sweep import MakePredictor, Scores, sweep
from acnml.tuning.temperature import temperature_by_nll

__all__ = [
    "ALPHAS",
    "PAPERS_ALPHAS",
    "PRIOR_PRECISIONS",
    "Choice",
    "Evidence",
    "Judged",
    "MakePredictor",
    "Match",
    "Scores",
    "Tolerance",
    "alpha_by_nll",
    "alpha_matching_cnml",
    "largest_harmless_alpha",
    "most_cautious",
    "prior_precision_by_evidence",
    "prior_precision_by_nll",
    "sweep",
    "temperature_by_nll",
    "within_price",
]
