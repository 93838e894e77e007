"""T(t,x): achieved aggregate FLOP/s of a task on x workers, from a table, from measurements, or from a model.

Nothing is imported here. Read in this order:

* `model`: what the planner asks of any of them;
* `table`, `parsing`: the user's own measurements;
* `online`, `isotonic`: what running tasks measure;
* `shape`, `cluster`, `recipe`: what is trained, on what, and how; then the formulas in `memory` and `timing`;
* `search`, `transformer`: the best configuration for every x by those formulas; `layouts` holds many at once;
* `sublinear`: what is assumed of a task of which nothing is known;
* `calibrated`: any model, set right by measurements;
* `published`: how far the formulas are off runs that others published.
"""
