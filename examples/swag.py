"""SWAG: a Gaussian fitted to the weights that SGD visits after training."""

from common import compare, load_data, network, timed, train

import acnml


def main(hidden: int = 400, epochs: int = 15, queries: int = 200) -> None:
    """Train a network, continue SGD at a constant learning rate, and compare predictions."""
    data = load_data()
    model = network(data, hidden)
    with timed("training"):
        train(model, data, epochs)
    classifier = acnml.Classifier(model)
    with timed("SWAG"):
        # The initial learning rate of the training, so that SGD leaves the minimum.
        swag = acnml.fit_swag(classifier, data.train, epochs=epochs, learning_rate=0.3, rank=20)
    compare(classifier, swag.low_rank(), data, queries)


if __name__ == "__main__":
    main()
