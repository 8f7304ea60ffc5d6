"""What `genie-t2t-run` prints: a banner, `[PROMPT]: ...`, a blank line, `[BEGIN]: <text>[END]`."""

from harness.errors import RuntimeOutputError

_BEGIN = "[BEGIN]: "
_END = "[END]"


def generated_text(output: str, device: str) -> str:
    """The generated text between the marks.

    The prompt is echoed before the first mark and the model's text may itself hold marks, so the
    text runs from the first mark at the start of a line to the last end mark.

    Raises:
        RuntimeOutputError: the marks are not there: the runner printed something else.
    """
    start = output.rfind("\n" + _BEGIN)
    end = output.rfind(_END)
    if start < 0 or end < start:
        raise RuntimeOutputError(device, "the runner printed no [BEGIN]: ... [END]", output[-500:])
    return output[start + 1 + len(_BEGIN) : end]
