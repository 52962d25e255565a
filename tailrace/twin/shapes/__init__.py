"""Shapes of models: from a configuration, or the header of a file, to an exact description.

`tensors` is the one list that everything is a sum over; `parts` the vocabulary of layers that it is made of; `rules`
and `kinds` read them from fields; `families` declare which rules an architecture has; `model` puts them together.
`precision` says how many bytes a tensor has, `split` what a rank holds, `sources` where configurations and headers
come from.
"""
