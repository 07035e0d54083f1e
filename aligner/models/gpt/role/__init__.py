"""Parts that roles of both backends share.

Begins with Lightning, whose torchmetrics imports three packages for plots and scores that are not
used here: two seconds.
"""

from aligner.importing import import_without

import_without("torchmetrics", "matplotlib", "scipy", "transformers")
