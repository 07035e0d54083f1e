"""Preferences for answers of the right form, which an untrained model can learn in seconds.

The prompts are those of `aligner.examples.tasks.arithmetic`. The chosen answer begins with a digit,
the rejected answer with another character. The tiny recipes use these pairs.
"""

import random
import string
from collections.abc import Iterator
from typing import Any

from aligner.examples.tasks.arithmetic import arithmetic_prompts

# Output of a model that samples bytes at random, broken characters included.
_OTHERS = (
    string.ascii_letters
    + string.punctuation
    + " \n\t\ufffd"
    + "".join(map(chr, range(0xA1, 0x180)))
)
_ANY = _OTHERS + string.digits


def form_pairs(*, longest: int = 4, **arguments: Any) -> Iterator[dict[str, Any]]:
    """Yield rows with the columns prompt, chosen and rejected.

    Both answers have the same number of characters, up to ``longest``, so that the length carries
    no information. They depend only on (seed, split, row). The other arguments are those of
    `arithmetic_prompts`.
    """
    key = f"{arguments.get('seed', 0)}/{arguments.get('split', 'train')}/form"
    for index, row in enumerate(arithmetic_prompts(**arguments)):
        generator = random.Random(f"{key}/{index}")
        more = generator.randrange(longest)
        chosen, rejected = (
            generator.choice(first) + "".join(generator.choices(_ANY, k=more))
            for first in (string.digits, _OTHERS)
        )
        yield {"prompt": row["prompt"], "chosen": chosen, "rejected": rejected}
