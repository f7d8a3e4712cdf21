"""The old name of `pdstage.tools.watch`, for one release."""

import sys
import warnings

from pdstage.tools import watch

warnings.warn("pdstage.watch is pdstage.tools.watch now", DeprecationWarning, stacklevel=2)
sys.modules[__name__] = watch
