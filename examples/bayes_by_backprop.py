"""Bayes by Backprop: train an independent Gaussian for every weight from scratch."""

from common import compare, load_data, network, timed

import acnml


def main(hidden: int = 1200, epochs: int = 15, queries: int = 200) -> None:
    """Train a 784-1200-1200-10 network as in the ACNML paper, and compare predictions."""
    data = load_data()
    classifier = acnml.Classifier(network(data, hidden))
    with timed("Bayes by Backprop"):
        posterior = acnml.fit_bayes_by_backprop(
            classifier, data.train, epochs=epochs, prior_std=0.1, learning_rate=1e-3
        )
    compare(classifier, posterior, data, queries)


if __name__ == "__main__":
    main()
