"""The one array type of the core: everything that decides privacy is float64."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
