"""The file protocol of `adb push`, `pull` and `ls` (AOSP packages/modules/adb, SYNC.TXT)."""
