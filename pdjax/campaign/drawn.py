"""What is drawn from the seed of a campaign: numbers of their own for each who draws, so that a seed repeats its draws.

Must never let two that run at once share their numbers: which of them draws first is up to the machine.
"""

from __future__ import annotations

import random

from pdjax.campaign.reference import SPECIAL, VOCABULARY

SHORTEST, LONGEST = 4, 60  # tokens of a prompt


def rng_of(seed: int, who: str) -> random.Random:
    """The numbers of that client, fault or list: the same ones in each process, whatever others draw."""
    return random.Random(f"{seed} {who}")


def prompts(seed: int, n: int) -> list[list[int]]:
    """n prompts of the tiny model, as token ids."""
    rng = rng_of(seed, "prompts")
    return [
        [SPECIAL + rng.randrange(VOCABULARY - SPECIAL) for _ in range(rng.randint(SHORTEST, LONGEST))]
        for _ in range(n)
    ]
