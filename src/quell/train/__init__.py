"""`quell train`, `quell predict` and `make demo`: a small model of a user's table or arrays, trained with privacy.

`table` and `arrays` read files, `data` checks and splits the examples, `models` builds a small model, `comparison`
trains as planned (and, if asked, without privacy and with DP-SGD), `counting` counts with noise, `content` says what
came out, `saved` keeps the model, `command` does it all.
"""
