"""Has something changed? Windows of answers without labels, beside a reference.

A `Monitor` knows the answers for validation data. Every window of new answers gives an expected
accuracy with its interval, the share that abstains, and how strong the evidence of a change is.

The evidence is a conformal test martingale (Vovk et al. 2005). The statistics (the atypicality and
the confidence) are sorted into bins whose edges come from one half of the reference. A new value
has the rank p among the other half and all earlier new values, ties broken at random. While
everything is exchangeable, these p are independent and uniform. So a gambler who starts with 1 and
bets on small or large p at fair odds has a wealth E that exceeds 1/level at any time, ever, with a
probability of at most `level` (Ville's inequality).

Bets are ε p^(ε - 1) and ε (1 - p)^(ε - 1). A share 1/(t (t + 1)) of the money starts to bet with
value t, so that a change after a long quiet time is still found soon. E is the mean over all bets.

What is assumed: without a change, new inputs and validation data are *exchangeable*, for example
drawn independently from one distribution. Values that depend on their predecessors, such as frames
of a video or hourly prices, are a change in this sense, and raise an alarm. A change that leaves
both statistics alone is not found: the labels of inputs may change while the inputs do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from acnml._util.arrays import as_values
from acnml._util.checks import require_share
from acnml.decisions.accuracy import AccuracyEstimate, expected_accuracy
from acnml.decisions.outcomes import Outcomes

STATISTICS = ("score", "confidence")
BINS = 100
EPSILONS = (0.2, 0.4, 0.6, 0.8)

# Values that are ranked at a time.
CHUNK = 2048


class Observed(NamedTuple):
    """What a monitor looks at: some columns of an `Answer`, for example from a file.

    >>> half = torch.tensor([0.5, 0.5])
    >>> answers = Observed(torch.tensor([0, 1]), half, half, half, abstain=half > 1)
    """

    label: Any  # the predicted class (B,), -1 for an input without an answer
    confidence: Any
    regret: Any
    score: Any
    abstain: Any


@final
@dataclass(frozen=True)
class Window:
    """What is known of a window of answers, made by `Monitor.update`.

    >>> from dataclasses import fields
    >>> [field.name for field in fields(Window)][:4]
    ['count', 'unanswered', 'accuracy', 'abstained']
    """

    count: int  # answers; inputs without an answer do not count
    unanswered: int
    accuracy: AccuracyEstimate
    abstained: float  # share
    score: float  # mean
    confidence: float  # mean
    regret: float  # mean
    classes: float  # total variation between the predicted classes and those of the reference
    evidence: float  # log10 E at its largest so far: 2 stands for 1 : 100
    changed: bool  # whether there has been an alarm, in this window or before
    alarm: bool  # whether it was in this window


@final
@dataclass(eq=False)
class Monitor:
    """Watches answers, window by window, in constant memory; made by `Calibrated.monitor`.

    It can be saved with `acnml.save` between windows, and goes on as if it had not been.

    Attributes:
        reference: labelled answers.
        level: largest probability of a false alarm, over the whole life of the monitor.
        edges: of the bins of every statistic.
        counts: values in every bin so far, those of half of the reference included.
        wealth: logarithms of the money of every statistic and bet that has been staked.
        seen: new values.
        evidence: the largest log10 E so far.
        changed_at: the number of the answer at which the alarm was raised.

    >>> normal, none = torch.randn(500), torch.zeros(500).long()
    >>> monitor = Monitor.of(Outcomes(none, none, normal.sigmoid(), normal, normal), level=0.01)
    >>> monitor.update(Observed(none, normal.sigmoid(), normal, normal + 1, none)).changed
    True
    """

    reference: Outcomes
    level: float
    edges: Tensor
    counts: Tensor
    wealth: Tensor
    seen: int = 0
    evidence: float = 0.0
    changed_at: int | None = None

    @staticmethod
    def of(reference: Outcomes, level: float = 0.01) -> Monitor:
        """Return a monitor that has seen no answers.

        The level holds while inputs are exchangeable with the reference. Inputs that depend on
        their predecessors raise more alarms.

        Args:
            reference: `Calibrator.outcomes`, or labelled answers that are as fresh.
            level: largest probability of a false alarm, ever.
        """
        require_share(level, "level")
        values = torch.stack([getattr(reference, name).double() for name in STATISTICS])
        # At random: the order of validation data may have a pattern.
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(values.shape[1], generator=generator, device="cpu")
        counted, for_edges = (values[:, rows] for rows in order.chunk(2))
        inner = torch.linspace(0, 1, BINS + 1, dtype=torch.float64, device="cpu")[1:-1]
        edges = torch.quantile(for_edges, inner, dim=1).T.contiguous()
        bins = torch.searchsorted(edges, counted)
        counts = torch.stack([torch.bincount(row, minlength=BINS) for row in bins])
        wealth = torch.full((len(STATISTICS), 2 * len(EPSILONS)), -math.inf, dtype=torch.float64)
        return Monitor(reference, level, edges, counts, wealth)

    def update(self, answers: Any) -> Window:
        """Take a window of answers in the order in which they came: an `Answer` or `Observed`."""
        answered = _on_cpu(answers.label) >= 0
        names, had_changed = (*STATISTICS, "regret"), self.changed_at is not None
        columns = {name: _on_cpu(getattr(answers, name))[answered].double() for name in names}
        label = _on_cpu(answers.label)[answered].long()
        for start in range(0, len(label), CHUNK):
            self._bet(torch.stack([columns[n][start : start + CHUNK] for n in STATISTICS]))
        return Window(
            count=len(label),
            unanswered=int((~answered).sum()),
            accuracy=expected_accuracy(columns["confidence"], self.reference),
            abstained=float(_on_cpu(answers.abstain)[answered].double().mean()),
            **{name: float(values.mean()) for name, values in columns.items()},
            classes=self._distance_of_classes(label),
            evidence=self.evidence,
            changed=self.changed_at is not None,
            alarm=self.changed_at is not None and not had_changed,
        )

    def _bet(self, values: Tensor) -> None:
        """Bet on the ranks of new values (statistics, n), one after the other."""
        generator = torch.Generator().manual_seed(self.seen)  # ties are broken the same way again
        chance = torch.rand(values.shape, generator=generator, dtype=torch.float64, device="cpu")
        ranks = self._ranks(torch.searchsorted(self.edges, values.contiguous()), chance)
        growth = _log_bets(ranks)  # (statistics, bets, n)
        t = torch.arange(1, values.shape[1] + 1, dtype=torch.float64, device="cpu") + self.seen
        # S_t = (S_{t-1} + 1/(t (t + 1))) f_t, for all t at once: sums of products, in logarithms.
        total = growth.cumsum(-1)
        before = torch.cat([torch.zeros_like(total[..., :1]), total[..., :-1]], -1)
        stakes = -torch.log(t * (t + 1)) - before
        staked = torch.logcumsumexp(torch.cat([self.wealth.unsqueeze(-1), stakes], -1), -1)
        wealth = staked[..., 1:] + total
        kept = -torch.log(t + 1)  # what has not been staked yet
        each = torch.logaddexp(wealth, kept.expand_as(wealth)).flatten(0, 1)
        evidence = (torch.logsumexp(each, 0) - math.log(len(each))) / math.log(10)
        alarms = (evidence >= -math.log10(self.level)).nonzero().flatten()
        if self.changed_at is None and len(alarms):
            self.changed_at = self.seen + int(alarms[0]) + 1
        self.evidence = max(self.evidence, float(evidence.max()))
        self.wealth, self.seen = wealth[..., -1], self.seen + values.shape[1]

    def _ranks(self, bins: Tensor, chance: Tensor) -> Tensor:
        """Return p (statistics, n): which share of the values so far is larger; ties at random."""
        hot = torch.nn.functional.one_hot(bins, BINS)  # (statistics, n, bins)
        so_far = self.counts.unsqueeze(1) + hot.cumsum(1)  # with the value itself
        larger = so_far.flip(-1).cumsum(-1).flip(-1) - so_far
        own = bins.unsqueeze(-1)
        above, same = (part.gather(-1, own).squeeze(-1) for part in (larger, so_far))
        self.counts = so_far[:, -1]
        return (above + chance * same) / so_far.sum(-1)

    def _distance_of_classes(self, label: Tensor) -> float:
        """Return the total variation between the shares of predicted classes."""
        both = (label, self.reference.predicted.long())
        most = int(max(int(part.max()) for part in both if len(part))) + 1
        ours, others = (torch.bincount(p, minlength=most) / max(1, len(p)) for p in both)
        return float((ours - others).abs().sum()) / 2


def _log_bets(ranks: Tensor) -> Tensor:
    """Return log ε p^(ε - 1) and log ε (1 - p)^(ε - 1) for all ε (statistics, bets, n)."""
    powers = torch.tensor(EPSILONS, dtype=torch.float64, device="cpu").unsqueeze(-1)
    sides = torch.stack([ranks, 1 - ranks], 1).clamp(min=1e-300).log()  # (statistics, 2, n)
    bets = powers.log() + (powers - 1) * sides.unsqueeze(2)
    return bets.flatten(1, 2)


def _on_cpu(values: Any) -> Tensor:
    return as_values(values).detach().cpu()
