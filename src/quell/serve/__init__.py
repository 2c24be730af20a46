"""`quell serve`: plans live in a browser, with sliders, on this machine only."""
