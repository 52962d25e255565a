"""The twin: what a deployment needs and gives, worked out before anything runs.

- `shapes`: what a model is, to the byte, from its configuration or the header of its file: parameters, weights, KV, and
  what each rank of a parallel deployment holds. Also of models that our engine cannot run.
- `catalogue`: devices and prices as data, each value with its unit, its source and the day that it was read.
- `fit`: which model at which precision fits which devices, with how many users at which context.
- `simulate`: what replicas would do with a load: the engine's own loop on a clock that the cost of each step moves.

Called by `cli`, and by rooms above that plan. It may read what lower rooms know (file formats, prices of the ledger);
nothing below it knows of it, and it never loads weights or runs a model.
"""
