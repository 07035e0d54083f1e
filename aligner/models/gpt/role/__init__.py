"""Parts that roles of both backends share.

Lightning is imported first, without three packages of its torchmetrics for plots and scores. The
library does not use them, and importing them takes two seconds.
"""

from aligner.importing import import_without

import_without("torchmetrics", "matplotlib", "scipy", "transformers")
