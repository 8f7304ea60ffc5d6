"""Points in time, as users give them."""

from datetime import UTC, datetime

from buildlib.errors import InvalidOptionError
from buildlib.sizes import parse_age
from harness.errors import WrongUseError


def parse_moment(text: str, option: str) -> datetime:
    """Read a date and time, in UTC unless it says otherwise, or an age: `7d`, `12h`.

    Raises:
        WrongUseError: it is neither; names the option.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        try:
            return datetime.now(UTC) - parse_age(text, option)
        except (InvalidOptionError, OverflowError):
            reason = f"{text!r} is neither an age such as 7d nor a date such as 2026-05-31"
            raise WrongUseError(f"{option}: {reason}") from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
