"""Last layer: a KFAC Laplace posterior over the final Linear layer; all other weights are fixed."""

from common import compare, load_data, network, timed, train

import acnml


def main(hidden: int = 400, epochs: int = 15, queries: int = 200) -> None:
    """Train a network, fit a posterior over its last layer, and compare predictions."""
    data = load_data()
    model = network(data, hidden)
    with timed("training"):
        train(model, data, epochs)
    classifier = acnml.Classifier(model)
    with timed("KFAC of the last layer"):
        curvature = acnml.fit.fit_curvature(classifier, data.train, layers="last")
    choice = acnml.tuning.prior_precision_by_evidence(curvature)
    print(f"prior precision {choice.value:.3g}, which has the largest evidence")
    compare(classifier, curvature.posterior(choice.value), data, queries)


if __name__ == "__main__":
    main()
