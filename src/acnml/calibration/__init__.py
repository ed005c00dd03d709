"""The front door: a trained classifier and data in, calibrated probabilities and the reasons out.

`calibrate` reads the logits and features of an `nn.Module` in one pass over the training data and
one over the validation data. `fit_calibrator` takes them as arrays. Both

1. choose the temperature T of least validation NLL (Guo et al. 2017),
2. fit a score m(x) of how atypical an input's features are (`acnml.atypicality.Atypicality`),
3. find the largest α whose validation NLL is at most `price` nats above that of the tempered
   logits, for logits with the covariance V(x) = α m(x)² I.
"""

from acnml.calibration.calibrator import Answer, Calibrator
from acnml.calibration.fitting import fit_calibrator
from acnml.calibration.network import Calibrated, calibrate
from acnml.calibration.table import CalibrationRow

__all__ = ["Answer", "Calibrated", "CalibrationRow", "Calibrator", "calibrate", "fit_calibrator"]
