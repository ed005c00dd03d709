"""Methods of calibration under shift at equal price, on digits, CIFAR-10, text and tables.

settings.py      settings and presets
subjects.py      what the study looks at: a network with its data and their shifts
digits.py        MNIST, and letters of notMNIST
cifar10.py       given networks and our own, under corruptions
clinc150.py      questions to an assistant
tabular_data.py  tables with a shift
recorded.py      what a network makes of its data, as artefacts
views.py         what the methods know of data
methods.py       the methods, and the choice of their knobs
measures.py      scores and their bootstrap
study.py         everything in its order
comparisons.py   who wins against whom
report.py        the pages
"""
