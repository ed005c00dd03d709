"""Score many inputs from files: Parquet, NumPy arrays or images in, Parquet out.

`score(job)` is what `acnml predict` runs. The input is cut into parts. Every part of the output is
complete or absent, so a run that was killed goes on where it stopped, and every row occurs exactly
once. Memory does not grow with the input, but .npz files are read whole. This package needs the
extra `predict`.

- `job.py`: what is scored, and how: settings. `functions.py` finds functions that they name.
- `files.py`: the files of the input, none of which is left out or exchanged unnoticed.
- `inputs.py`: the kinds of input. `sources.py` has what they have in common.
- `columns.py`: columns of a table as arrays, and rows that do not fit.
- `scorer.py`: inputs to answers, and the reasons where there are none.
- `output.py`: the folder with the results.
- `run.py`: everything together.
"""

from acnml._util.messages import needed_by

with needed_by("acnml.scoring", "acnml[predict]"):
    from acnml.scoring.job import Answers, Job, Reading, ScoringError
    from acnml.scoring.output import Summary
    from acnml.scoring.run import score, verify

__all__ = ["Answers", "Job", "Reading", "ScoringError", "Summary", "score", "verify"]
