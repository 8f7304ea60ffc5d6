"""Runs on devices, beside the files of `device_scripts`: standard-library Python 3.8."""
