"""The studies: the experiments of the paper and further ones, on one engine.

They are part of the repository and not of the installed package. `python -m studies` lists them.

    engine/         what a study is, and the engine that runs it: see docs/howto/write-a-study.md
    store/          resumable artefacts: stages, records, checkpoints, blocks of predictions
    training/       training networks, in one process or several
    data/           data sets: catalogue, downloads, loading
    corruptions/    the corruptions of CIFAR-10-C
    models/         networks
    rotated_mnist/  MNIST under rotation
    cifar10_c/      CIFAR-10 under corruption
    toy/            exact CNML and CNMAP in the plane
    theory/         errors and their bounds as the data grow
"""
