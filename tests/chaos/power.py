"""A hub that switches the power of hosted devices: `python -m tests.chaos.power FOLDER NUMBER`."""

import sys
from pathlib import Path

from plugins.virtual_android.host import hosted_control


def main() -> None:
    folder, number = sys.argv[1:]
    hosted_control(Path(folder), int(number)).power_on()


if __name__ == "__main__":
    main()
