"""A first taste without writing code: train on a user's arrays, without privacy, with DP-SGD, and as planned.

`quell train` and `make demo` are this package: `data` (arrays from a file), `models` (small ones), `comparison` (the
three ways of training, run by run), `results` (table, picture, page), `command` (what `quell train` does).
"""
