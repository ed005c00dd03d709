"""The studies: the experiments of the paper and further ones.

They are part of the repository and not of the installed package. `python -m studies` lists them.

What studies are made of:

    engine/         what a study is, and the engine that runs it: see docs/howto/write-a-study.md
    store/          resumable artefacts: stages, records, checkpoints, blocks of predictions
    settings.py     settings by name: presets, and `--set`
    data/           data sets: catalogue, downloads, loading
    corruptions/    the corruptions of CIFAR-10-C
    models/         networks, and weights from files
    weights/        weights of our own networks
    training/       training networks, in one process or several
    features.py     recorded inputs of a last layer
    search.py       one knob within a price
    drawing.py      how figures look and become bytes
    page.py         a self-contained HTML page
    terminal.py     progress bars, and the frame that runs a short study
    files.py        files that are complete or not there

Studies on the engine:

    paper_mnist/    MNIST under rotation, as in the paper
    rotated_mnist/  MNIST under rotation, with more methods
    cifar10_c/      CIFAR-10 under corruption

Studies that use only the store, or run in one go:

    demo/           `acnml.calibrate` and its rivals on rotated digits
    evidence/       all methods at equal price, on several data sets
    tabular.py      tables: `acnml.sklearn`, and conformal sets
    text.py         questions to an assistant
    decisions/      abstaining, accuracy without labels, noticing a change
    label_noise.py  finding wrong labels
    if_comp.py      the protocol of IF-COMP
    heads.py        several labels of an image, and the words of a text
    linearised.py   over all layers: the linearised network against the network itself
    fidelity/       approximations against CNML by retraining
    toy/            exact CNML and CNMAP in the plane
    theory/         errors and their bounds as the data grow
"""
