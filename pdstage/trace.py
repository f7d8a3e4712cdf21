"""The old name of `pdstage.tools.trace`, for one release."""

import sys
import warnings

from pdstage.tools import trace

warnings.warn("pdstage.trace is pdstage.tools.trace now", DeprecationWarning, stacklevel=2)
sys.modules[__name__] = trace
