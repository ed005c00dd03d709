"""SWAG: a Gaussian around the weights that SGD visits once it has found a good place."""

from common import load_data, network, report, timed, train

import acnml


def main(hidden: int = 400, epochs: int = 20, queries: int = 20) -> None:
    """Train a network, let SGD wander on from there, and compare predictions."""
    data = load_data()
    model = network(data, hidden, hidden)
    with timed("training"):
        train(model, data, epochs)
    classifier = acnml.Classifier(model)
    with timed("SWAG"):
        # A larger learning rate than the last of training: SGD must leave the minimum.
        posterior = acnml.fit_swag(classifier, data.train, epochs, learning_rate=0.02, rank=20)
    report(classifier, posterior, data, queries)


if __name__ == "__main__":
    main()
