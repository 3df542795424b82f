"""How many rows of the prompt a layer keeps."""

from tidekv.errors import InfeasibleError


def rows(budget: int | float, prompt_tokens: int) -> int:
    """Rows kept per layer and KV head: an int is taken as it is, a float is a share of the prompt.

    A share is rounded down, to one row at least.

    Raises:
        InfeasibleError: not in [1, prompt_tokens], or a share outside (0, 1].
    """
    if isinstance(budget, float):
        if not 0.0 < budget <= 1.0:
            raise InfeasibleError(
                f"A budget of {budget} is no share of the prompt; use a float in (0, 1] "
                "or a number of rows (an int)."
            )
        # 0.57 of 100 is 57, although the product in binary lies just below it.
        return max(1, int(round(budget * prompt_tokens, 6)))
    if not 1 <= budget <= prompt_tokens:
        raise InfeasibleError(
            f"A budget of {budget} rows is outside 1..{prompt_tokens}, the prompt's length; "
            "use a smaller budget, or selector=None to keep every row."
        )
    return budget
