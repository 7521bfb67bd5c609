"""Sampling classes: requests whose drafts are accepted by a similar law.

A node's raw probability is the draft's at temperature 1, whatever the request asks
for; what it is worth depends on how the target's token is chosen:

    greedy       the arg-max: likely tokens are accepted more often than the draft says
    (0, 0.5]     a sharpened law, close to greedy
    (0.5, 0.9]   the usual settings of chat, 0.6 to 0.8
    over 0.9     around 1, the law that drafts are trained on

Each comes twice: plain, and for requests whose sampling transforms the target's law but
not the draft's (penalties, logit bias, allowed tokens, a grammar, a custom processor).
Such a request may reject everything; its class keeps that away from the others.
"""

import math

_BANDS = ("greedy", "temperature_to_0.5", "temperature_to_0.9", "temperature_over_0.9")
_BAND_ENDS = (0.5, 0.9)
# Below this SGLang takes the arg-max (sampling_params.py).
_LOWEST_TEMPERATURE = 1e-6

NUM_PLAIN_CLASSES = len(_BANDS)
NUM_SAMPLING_CLASSES = 2 * NUM_PLAIN_CLASSES
# By class; class c + NUM_PLAIN_CLASSES is the transformed one of plain class c.
SAMPLING_CLASS_NAMES = (*_BANDS, *(f"{band}_transformed" for band in _BANDS))


def sampling_class(temperature: float, *, transformed: bool) -> int:
    """Return a request's class, 0 <= class < NUM_SAMPLING_CLASSES.

    temperature  finite, >= 0; 0 for a request that is greedy in another way (top_k 1)
    transformed  whether its sampling changes the target's law alone; temperature,
                 top-k, top-p and min-p do not count as such a change

    Raises ValueError for any other temperature.
    """
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be finite and >= 0, got {temperature}")
    band = 0
    if temperature >= _LOWEST_TEMPERATURE:
        band = 1 + sum(temperature > end for end in _BAND_ENDS)
    return band + NUM_PLAIN_CLASSES * transformed
