"""KFAC Laplace: a posterior from the curvature of the loss, one Kronecker product per layer."""

from common import compare, load_data, network, timed, train

import acnml


def main(hidden: int = 400, epochs: int = 15, queries: int = 200) -> None:
    """Train a network, compute its curvature, choose the prior, and compare predictions."""
    data = load_data()
    model = network(data, hidden)
    with timed("training"):
        train(model, data, epochs)
    classifier = acnml.Classifier(model)
    with timed("KFAC"):
        curvature = acnml.fit.fit_curvature(classifier, data.train)
    with timed("prior precision"):
        choice = acnml.tuning.prior_precision_by_evidence(curvature)
    print(f"prior precision {choice.value:.3g}, which has the largest evidence")
    compare(classifier, curvature.posterior(choice.value), data, queries)


if __name__ == "__main__":
    main()
