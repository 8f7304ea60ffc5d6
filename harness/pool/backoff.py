"""How long to leave alone what failed."""


def backoff(first_s: float, most_s: float, failures: int) -> float:
    """Seconds to wait after that many failures: doubled each time, up to a bound."""
    return min(first_s * 2.0 ** min(failures, 30), most_s)
