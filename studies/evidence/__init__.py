"""Methods of calibration under shift at equal price, on images, texts, tables and streams.

settings.py      settings and presets
recorded.py      what a network makes of its data, as artefacts: logits and features
subjects.py      what the study looks at: a network with its data and their shifts
letters.py       letters of notMNIST, rotated
cifar.py         CIFAR-10 and CIFAR-100 under corruptions: given networks and our own
encoder.py       EfficientNet-lite0
pictures.py      Tiny-ImageNet, Caltech-101, ImageNet
clinc150.py      questions to an assistant
reviews.py       reviews whose writers changed them
tabular_data.py  tables with a shift
streams.py       rows in the order of time
views.py         what the methods know of data
methods.py       the methods, and the choice of their knobs
measures.py      scores and their bootstrap
study.py         everything in its order
comparisons.py   who wins against whom
report.py        the pages
"""
