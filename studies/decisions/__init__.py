"""What calibrated probabilities are for: abstaining, accuracy without labels, noticing a change.

settings.py   settings and presets
training.py   small networks
digits.py     a network for digits, rotated and noisy
methods.py    where confidences come from, and two other estimates of the accuracy
abstain.py    certified thresholds: how often they fail, and what they do under shift
estimate.py   accuracy without labels, and conformal sets
streams.py    data in the order of time
change.py     false alarms and delay to detection
report.py     the pages
"""
