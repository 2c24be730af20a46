"""`quell train` and `make demo`: train a small model on a user's arrays without privacy, with DP-SGD, and as planned.

`data` reads the arrays, `models` builds a small model, `comparison` trains in the three ways, `content` says what came
out, `command` does it all.
"""
