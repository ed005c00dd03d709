"""The claims about CIFAR-10 and CIFAR-10-C, the paper's and others: data and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from studies.cifar10_c import methods as ms
from studies.cifar10_c import report
from studies.cifar10_c.settings import Cifar10CStudy
from studies.engine import claims
from studies.engine.claims import SHOWN, Claim, Groups
from studies.engine.method import ACNML, Method

COMPARABLE = {"accuracy": 0.005, "nll": 0.05}
CLOSE = 0.05  # total variation
BEYOND = "Beyond the paper: "


@final
@dataclass(frozen=True)
class Trio:
    """ACNML with a posterior, beside the network and a Bayesian average."""

    name: str
    network: Method
    average: Method
    acnml: Method
    is_papers: bool = True

    @property
    def others(self) -> tuple[Method, Method]:
        """What ACNML is compared with."""
        return self.network, self.average

    def says(self, text: str) -> str:
        """Mark a claim that is not the paper's."""
        return text if self.is_papers else BEYOND + text[0].lower() + text[1:]


TRIOS = (
    Trio("SWAG-D", ms.MAP_SWA, ms.BMA_SWAG_D, ms.ACNML_SWAG_D_PAPERS),
    Trio("KFAC-Laplace", ms.MAP_SWA, ms.BMA_KFAC, ms.ACNML_KFAC_PAPERS),
    Trio("KFAC on the last layer", ms.MAP_SWA, ms.BMA_SWAG_D, ms.ACNML_HEAD, is_papers=False),
)
# A method, and the temperature that it is compared with.
AGAINST_TEMPERATURES = (
    *((trio.acnml, ms.TEMPERED) for trio in TRIOS),
    (ms.ACNML_SWAG_D_PAPERS, ms.TEMPERED_MATCHED),
    (ms.ACNML_HEAD_TEMPERED, ms.TEMPERED_NEAR),
    (ms.ACNML_HEAD_ALPHA_TEMPERED, ms.TEMPERED_NEAR),
    (ms.ACNML_SWAG_D_TEMPERED, ms.TEMPERED_NEAR),
    (ms.ACNML_HEAD_ALPHA, ms.TEMPERED_BUDGET),
    (ms.ACNML_SWAG_D, ms.TEMPERED_BUDGET),
    (ms.ACNML_KFAC, ms.TEMPERED_BUDGET),
)
# That α is the better knob of a last layer was noticed on images of severity 5.
PICKED_ON_SHIFTED = (ms.ACNML_HEAD_ALPHA, ms.ACNML_HEAD_ALPHA_TEMPERED)


def all_claims(settings: Cifar10CStudy) -> tuple[Claim, ...]:
    """Return the claims about methods that the study has."""
    used, hard = set(ms.methods_of(settings)), report.hard_groups(settings)
    trios = [trio for trio in TRIOS if {*trio.others, trio.acnml} <= used]
    pairs = [pair for pair in AGAINST_TEMPERATURES if set(pair) <= used]
    swept = [family for family in ms.FAMILIES if settings.sweeps and family.rule == ACNML]
    return (
        *(comparable(trio, score) for score in COMPARABLE for trio in trios),
        *(better(trio, score, hard) for score in ("ece", "brier", "nll") for trio in trios),
        *(fast(method) for method in ms.COSTLY if method in used),
        *(beats(ours, tempered, hard) for ours, tempered in pairs),
        *(more_than_tempering(family) for family in swept),
    )


def comparable(trio: Trio, score: str) -> Claim:
    """Claim that a score of clean images is hardly worse than that of the others."""
    text = (
        f"In distribution, ACNML with {trio.name} has an {SHOWN[score]} comparable to that of "
        f"{_names(trio.others)}."
    )
    return claims.comparable(trio.says(text), trio.acnml, trio.others, score, COMPARABLE[score])


def better(trio: Trio, score: str, hard: Groups) -> Claim:
    """Claim that a score is lower than those of the others under strong corruption."""
    text = (
        f"Under strong corruption, ACNML with {trio.name} has a lower {SHOWN[score]} than "
        f"{_names(trio.others)}."
    )
    rule = f"lower mean {SHOWN[score]} over corruptions than both, {_at_each(hard)}"
    return claims.lower(trio.says(text), rule, trio.acnml, trio.others, score, hard)


def beats(ours: Method, tempered: Method, hard: Groups) -> Claim:
    """Claim that ACNML is better calibrated than a temperature under strong corruption."""
    text = f"{BEYOND}{_names([ours])} has a lower ECE under strong corruption than "
    rule = f"lower mean ECE over corruptions, {_at_each(hard)}"
    claim = claims.lower(f"{text}{_names([tempered])}.", rule, ours, [tempered], "ece", hard)
    if ours in PICKED_ON_SHIFTED:
        return claim._replace(caveat="this knob was picked after results at severity 5")
    return claim


def more_than_tempering(family: Method) -> Claim:
    """Claim that a family of methods is below the path of temperatures."""
    text = f"{BEYOND}{_names([family])} does more than lower all confidences as a temperature does."
    rule = "on average lower ECE than the temperature of equal held-out NLL, over the sweep"
    return claims.more_than_on_average(text, rule, family, ms.TEMPERED)


def fast(method: Method) -> Claim:
    """Claim that the linearised solution is close to the paper's steps."""
    text = f"{BEYOND}with {method.posterior}, the fast solution can replace the gradient steps."
    return claims.close(text, method, CLOSE)


def _names(compared: Sequence[Method]) -> str:
    return " and ".join(ms.LOOKS[method].label for method in compared)


def _at_each(hard: Groups) -> str:
    severities = " and ".join(name.removeprefix("severity ") for name in hard)
    return f"at each of the severities {severities}"
