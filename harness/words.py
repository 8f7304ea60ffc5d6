"""Words that several parts put into what people read."""


def counted(number: int, noun: str) -> str:
    """A number of things: `1 run`, `2 runs`, `1,500 entries`; `noun` is the name of one."""
    if number == 1:
        return f"1 {noun}"
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {plural}"


def soc_in_words(soc: str, *, emulator: bool) -> str:
    """`SM8750`, `SM8750 emulator`, `emulator`; empty where nothing is known."""
    return " ".join(filter(None, (soc, "emulator" if emulator else "")))
