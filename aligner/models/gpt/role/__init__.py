"""Parts that roles of both backends share."""

from aligner.importing import import_without

import_without("torchmetrics", "matplotlib", "scipy", "transformers")
