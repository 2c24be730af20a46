"""Where clipped sums come from: `layers.py` is the engine, `microbatch.py` serves models that it cannot take."""
