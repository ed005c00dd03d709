"""A method as plain data: a rule, what it stands on, a solver, and one knob."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias, final

# Rules.
MAP, BMA, GLM, DROPOUT, ACNML = "MAP", "BMA", "GLM", "MC dropout", "ACNML"
SAMPLING = (BMA, DROPOUT)  # rules that average over samples
# Knobs.
TEMPERATURE, ALPHA, TAU, SCALE = "temperature", "alpha", "prior precision", "covariance scale"
# Solvers of ACNML.
LINEARISED, PAPER_STEPS, CONVERGED = "linearised", "paper's steps", "converged"
# How a knob is set: fixed in advance, or swept. The other rules are the study's.
FIXED, SWEPT = "fixed", "sweep"
# The one posterior that methods can have with two different knobs.
HEAD = "KFAC last layer"

Grids: TypeAlias = Mapping[str, tuple[float, ...]]  # knob -> values that are tried


@final
@dataclass(frozen=True)
class Method:
    """A way to get probabilities.

    Args:
        rule: MAP, BMA, GLM, MC dropout, ACNML, or a rule of the study.
        posterior: what the rule stands on; a key of the study's `grounds`.
        solver: how ACNML is solved.
        knob: the one parameter that can be changed.
        value: of the knob; None until it is chosen on held-out data.
        choice: how it is chosen; a key of the study's `choices`, or `FIXED`.
        likelihood: the temperature that divides the network's logits before anything else; None
            until it is found, as the plain network's temperature of least held-out NLL.
        scale: of the posterior's covariance, before α; None until it is found, as the chosen value
            of the study's `scale_from`.
    """

    rule: str
    posterior: str
    solver: str = ""
    knob: str = ""
    value: float | None = 1.0
    choice: str = FIXED
    likelihood: float | None = 1.0
    scale: float | None = 1.0

    @property
    def name(self) -> str:
        """A name that is the same for all values of the knob and differs between methods."""
        parts = [f"{self.rule} {self.posterior}"]
        if self.knob == TEMPERATURE:
            parts.append("tempered")
        if self.likelihood != 1:
            parts.append("tempered likelihood")
        if self.is_head_by_alpha:
            parts.append("by alpha")
        if self.solver not in ("", LINEARISED):
            parts.append(self.solver)
        if self.choice != FIXED:
            parts.append(self.choice)
        return ", ".join(parts)

    @property
    def family(self) -> Method:
        """The method whose sweep the knob is chosen from: one serves all solvers and rules."""
        return replace(self, solver=LINEARISED if self.solver else "", value=None, choice=SWEPT)

    @property
    def is_head_by_alpha(self) -> bool:
        """Whether the last layer's posterior has a fixed prior and α for a knob."""
        return (self.posterior, self.knob) == (HEAD, ALPHA)

    @property
    def knob_text(self) -> str:
        """The knob's value, with the scale and the temperature that come with it."""
        knob = f"{self.knob}={self.value:g}" if self.knob else ""
        knob += f", scale={self.scale:g}" if self.scale != 1 else ""
        return knob + (f", T={self.likelihood:g}" if self.likelihood != 1 else "")

    @property
    def words(self) -> tuple[str, str, str, str, str]:
        """The columns that describe a method in a CSV file; the name alone identifies it."""
        return self.name, self.rule, self.posterior, self.solver, self.knob_text

    def at(self, value: float) -> Method:
        """Return the method with its knob set."""
        return replace(self, value=value)

    def label(self, choices: Mapping[str, str]) -> str:
        """Return the name for tables; `choices` says what ways of choosing are called."""
        rule = f"tempered {self.rule}" if self.knob == TEMPERATURE else self.rule
        rule = f"{rule} on Temp" if self.likelihood != 1 else rule
        posterior = "last layer" if self.posterior == HEAD else self.posterior
        posterior += " by α" if self.is_head_by_alpha else ""
        solver = f", {self.solver}" if self.solver not in ("", LINEARISED) else ""
        choice = f" ({choices[self.choice]})" if choices.get(self.choice) else ""
        return f"{rule}, {posterior}{solver}{choice}"


class Share(NamedTuple):
    """What a method sees of a shift.

    Attributes:
        inputs: how many, the first of one order; 0 if the method does not see the shift at all.
        block: how many are predicted at once: what a killed run may lose.
        in_tranches: whether predictions are cut at fixed numbers of inputs, so that a run for more
            inputs continues one for fewer.
    """

    inputs: int
    block: int = 500
    in_tranches: bool = False


class Look(NamedTuple):
    """A method's label, colour and marker in figures."""

    label: str
    colour: str
    marker: str


def cautious_first(knob: str, grids: Grids) -> tuple[float, ...]:
    """Return a knob's values, the most cautious first: a prior is cautious when it is wide."""
    return tuple(sorted(grids[knob], reverse=knob != TAU))
