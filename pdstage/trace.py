"""The old name of `pdstage.tools.trace`, for one release."""

from typing import TYPE_CHECKING

from pdstage.renamed import renamed

if TYPE_CHECKING:
    from pdstage.tools.trace import *  # noqa: F403

renamed(__name__, "pdstage.tools.trace")
