"""T(t,x): achieved aggregate FLOP/s of a task on x workers, from a table, from measurements, or from a model.

Nothing is imported here. Read in this order:

* `model`: the interface that the planner uses, `SublinearModel`, the assumption for a task without any data, and
  `MeasuredTable`, the user's own measurements;
* `description`: the model, the machines and the training method;
* `transformer`: the formulas of memory and time, and the best configuration for every x by them;
* `calibrated`: any model, corrected by measurements of running tasks.
"""
