"""T(t,x): achieved aggregate FLOP/s of a task on x workers, from a table, from measurements, or from a model.

Nothing is imported here. Read in this order:

* `model`: the interface that the planner uses, and `SublinearModel`, the assumption for a task without any data;
* `table`, `parsing`: the user's own measurements;
* `shape`, `cluster`, `recipe`: the model, the machines and the training method; then the formulas in `memory` and
  `timing`;
* `search`, `transformer`: the best configuration for every x by those formulas; `layouts` holds many at once;
* `calibrated`: any model, corrected by measurements of running tasks.
"""
