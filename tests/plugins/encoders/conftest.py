"""The scripts of devices, which import each other as files beside them."""

from tests.device_scripts.conftest import SCRIPTS

__all__ = ["SCRIPTS"]
