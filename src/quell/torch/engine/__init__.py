"""Where clipped gradient sums come from: `layers.py` is the engine, `microbatch.py` serves models that it cannot take."""
