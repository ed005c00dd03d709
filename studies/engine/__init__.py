"""The engine: a study is a value, and one engine runs every study (docs/howto/write-a-study.md).

method.py       methods as plain data: rule, posterior, solver, knob
study.py        what a study is: data, networks, grounds, methods, claims, order of work
workshop.py     stages become artefacts; the networks of one seed
grounds.py      what rules stand on: networks, and posteriors around them
predictors.py   from a method to a predictor, and what is saved of its predictions
predict.py      predictions in resumable blocks and tranches
choose.py       knobs, chosen on held-out data
results.py      numbers from saved predictions
claims.py       claims and how they are judged
tables.py, figures.py, sections.py, report.py    the report
redraw.py       figures of finished results, from their CSV files
run.py          the order of the work, and the plan of a dry run
command.py      `python -m studies NAME`
"""
