"""How many rows of the prompt a layer keeps."""

import math
from collections.abc import Sequence
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

from tidekv.errors import InfeasibleError

#: Rows that are kept where nobody says how many.
_DEFAULT = 1024


def default(prompt_tokens: int) -> int:
    """The budget where none is given: the whole prompt where it is shorter than that."""
    return min(_DEFAULT, prompt_tokens)


def rows(budget: Any, prompt_tokens: int) -> int:
    """Rows kept per layer and KV head: an int is taken as it is, a float is a share of the prompt.

    A share is rounded down, to one row at least.

    Raises:
        InfeasibleError: not in [1, prompt_tokens], or a share outside (0, 1], or neither.
    """
    if isinstance(budget, bool) or not isinstance(budget, Real):
        raise InfeasibleError(
            f"A budget is a number of rows (an int) or a share of the prompt (a float), not "
            f"{budget!r}."
        )
    if not isinstance(budget, Integral):
        share = float(budget)
        if not 0.0 < share <= 1.0:
            raise InfeasibleError(
                f"A budget of {share} is no share of the prompt; use a float in (0, 1] "
                "or a number of rows (an int)."
            )
        # 0.57 of 100 is 57, although the product in binary lies just below it.
        return max(1, int(round(share * prompt_tokens, 6)))
    number = int(budget)
    if not 1 <= number <= prompt_tokens:
        raise InfeasibleError(
            f"A budget of {number} rows is outside 1..{prompt_tokens}, the prompt's length; "
            "use a smaller budget, or selector=None to keep every row."
        )
    return number


def pyramid(layers: int, *, mean: int, most: int, beta: float) -> list[int]:
    """Rows of each layer, falling linearly from the first to the last, layers·mean in all.

    The last layer has ⌊mean / beta⌋ rows (Cai et al. 2024, PyramidKV), or as many as
    let the first have ``most``, which is at least ``mean``.
    """
    if layers == 1:
        return [mean]
    first = min(2 * mean - int(mean // beta), most)
    last = 2 * mean - first
    # In units of 1 / (layers - 1) row all are whole, and so is their sum.
    exact = [first * (layers - 1) - layer * (first - last) for layer in range(layers)]
    return _rounded(exact, layers - 1, layers * mean)


def _rounded(numerators: list[int], denominator: int, total: int) -> list[int]:
    """Fractions that sum to ``total``, rounded so that they still do: largest remainders go up."""
    parts = [numerator // denominator for numerator in numerators]
    by_remainder = sorted(
        range(len(parts)), key=lambda part: numerators[part] % denominator, reverse=True
    )
    for part in by_remainder[: total - sum(parts)]:
        parts[part] += 1
    return parts


def proportional(weights: Sequence[float], total: int, most: int) -> list[int]:
    """Share ``total`` rows in proportion to ``weights``, none getting more than ``most``.

    Rounded by D'Hondt's method, on exact fractions: it is the one that keeps a share's lower whole
    number and, as every divisor method, takes no row from one to give it to another when one more
    comes to share the same total. So a layer's rows only ever fall as layers are added. Equal
    claims are won by the first. Weights that are no positive number count as the smallest there is.

    Args:
        total: at most ``most`` times the number of weights.
    """
    exact = [Fraction(w if 0 < w < math.inf else math.ulp(0.0)) for w in weights]
    shares = [most] * len(exact)
    free = list(range(len(exact)))  # those that ``most`` doesn't bound
    while free:
        left = total - sum(shares[i] for i in range(len(exact)) if i not in free)
        whole = sum(exact[i] for i in free)
        bounded = [i for i in free if exact[i] * left >= most * whole]
        if not bounded:
            break
        free = [i for i in free if i not in bounded]
    for i in free:
        shares[i] = int(exact[i] * left / whole)
    for _ in range(total - sum(shares)):
        claims = [i for i in free if shares[i] < most]
        shares[max(claims, key=lambda i: (exact[i] / (shares[i] + 1), -i))] += 1
    return shares


def quantised(total: int, heads: int, *, least: int, residual: int, group: int) -> tuple[int, int]:
    """How many of ``total`` rows of some heads can be quantised, and how many can stay in full.

    Of a head of c rows ⌈(c - residual) / group⌉ groups are quantised, none if that is negative.
    The most are there if rows beyond the ``least`` of each head go where they soonest begin another
    group: to every head up to the first, or to a single one if all others are cheaper than the
    first. The fewest are there if as many rows as can be are not quantised.

    Args:
        heads: of all prompts.
        least: rows that each head has at least.
    """
    always = -(-max(least - residual, 0) // group)
    free, first = total - heads * least, residual + always * group + 1 - least
    begun = min(heads if first <= group else 1, free // first)
    more = (free - begun * first) // group if begun else 0
    most = heads * always + begun + more
    fewest = max(-(-(total - heads * residual) // group), heads * always)
    return most * group, total - fewest * group
