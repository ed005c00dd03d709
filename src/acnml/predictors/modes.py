"""Modes: ACNML around several networks, for every label with the one that explains it best."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from torch import Tensor

from acnml._util.batches import Inputs, arrays_for_arrays
from acnml.predictors.base import NmlPredictor
from acnml.predictors.ensemble import members_of, stacked


@final
@dataclass(frozen=True, eq=False)
class Modes(NmlPredictor):
    """p(y|x) ∝ max_m w_m p_θ̂_m,y(y|x), the best explanation of each label by any of n networks.

    The posterior is a mixture of Gaussians around independently trained networks, the modes. Each
    mode m has its own maximiser θ̂_m,y = argmax_θ α log p_θ(y|x) + log q_m(θ). Of several
    maximisers, the paper takes the one with the highest likelihood of the query (its appendix on
    multiple MLEs): this choice maximises the regret for that label. A label that a single network
    can explain counts as explained. The average over networks is an `Ensemble` of the same members.

    The rule treats all modes as equally good for the training data, as independently trained
    networks usually are. With unequal modes, `log_weights` says by how many nats: a mode with a
    weight of -1 must explain a label better by a factor of e. They are the logarithms of the
    densities at the means, relative to the largest, and not the masses of the components: a
    component that is wider has more mass, but does not explain the training data better.

    Prediction costs as much as an ensemble: each member is solved once.

    Args:
        predictors: the members, usually `Acnml`; any predictor with `log_lik` will do.
        log_weights: log w_m, by default equal. The largest one counts as 0.

    >>> from acnml import Acnml, Classifier, Diagonal
    >>> def member():
    ...     classifier = Classifier(torch.nn.Linear(4, 3))
    ...     mean = classifier.copy_parameters(["weight", "bias"])
    ...     var = {name: torch.ones_like(tensor) for name, tensor in mean.items()}
    ...     return Acnml(classifier, Diagonal(mean, var))
    >>> Modes((member(), member()))(torch.zeros(2, 4)).shape
    torch.Size([2, 3])
    """

    predictors: tuple[NmlPredictor, ...]
    log_weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "predictors", members_of(self, self.predictors, NmlPredictor))
        if self.log_weights is None:
            return
        if len(self.log_weights) != len(self.predictors):
            raise ValueError(f"pass one of log_weights for each of {len(self.predictors)} members")
        object.__setattr__(self, "log_weights", tuple(map(float, self.log_weights)))

    @arrays_for_arrays
    def log_lik(self, x: Inputs) -> Tensor:
        """Return max_m log w_m + log p_θ̂_m,y(y|x) (B, K), on the first member's device."""
        members = stacked([member.log_lik(x) for member in self.predictors])
        if self.log_weights is not None:
            weights = members.new_tensor(self.log_weights)
            members = members + (weights - weights.max())[:, None, None]
        return members.amax(0)

    def with_alpha(self, alpha: float) -> Modes:
        """Return the same modes with another weight α of the query, the same for all."""
        members = [replace(member, alpha=alpha) for member in self.predictors]  # type: ignore[type-var]
        return replace(self, predictors=tuple(members))
