"""The errors of `harness`: one root, each with the data of what went wrong.

    HarnessError
      WrongUseError            an option or argument that cannot be used
      RuntimeChoiceError       no runtime fits the container and the device
      PromptTooLongError
      AdbServerError
        AdbAddressError        an environment variable that cannot be used
      NoDeviceError
      SeveralDevicesError
      HostFileError            a file of this host that cannot be read or written
      DeviceError              root of what one device does wrong
        DeviceConnectError
        DeviceUnauthorizedError
        DeviceLostError        went away in the middle
        DeviceTimeoutError
        DeviceCommandError     a command on it failed
        DeviceTransferError    it refused a file
          DevicePathError
          DevicePermissionError
        DeviceFullError
        DeploymentCorruptError
        RunnerError            the runner on the device failed
        RuntimeOutputError     the runner printed or wrote garbage
      StoreError
        MissingStoreError      no database to read
        NotAStoreError         some other file, or a damaged one
        NewerSchemaError       written by a newer qnnfarm
        StoreLockedError       another process holds it
        StoreUnavailableError  cannot be reached, read or written
        UnknownRunError
        RunConflictError       contradicts what is stored
        CorruptRunError        not written by qnnfarm
        UnknownMetricError
        MetricValueError
      VirtualDeviceError       root of what virtual devices raise
        VirtualDeviceNameError
        UnknownVirtualDeviceError
        VirtualDeviceChangeError    another SoC or size than it was made with
        VirtualDeviceRecordError    a damaged record, or a newer qnnfarm's
        VirtualDeviceStartError
        VirtualDeviceBusyError      another command works on it
        AdbKeyError            a file that holds no usable adb key
        AdbProtocolError       a peer that does not speak ADB

`str(error)` is one line for the user: what is wrong, where, and what to do. All data goes to
`super().__init__`, so that every error survives pickling on its way out of a worker process.
"""


class HarnessError(Exception):
    """Root of everything `harness` raises on purpose.

    Attributes:
        exit_code: what the command line exits with: 1 failed, 2 wrong use.
    """

    exit_code = 1


class StoreError(HarnessError):
    """Root of what the results store raises."""


class MissingStoreError(StoreError):
    """There is no results database to read."""

    exit_code = 2

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self.location = location

    def __str__(self) -> str:
        return f"no results database at {self.location}: `qnnfarm bench --db` makes one"


class NotAStoreError(StoreError):
    """What was named as results database is something else, or damaged."""

    exit_code = 2

    def __init__(self, location: str, reason: str) -> None:
        super().__init__(location, reason)
        self.location = location
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.location} is no results database: {self.reason}"


class NewerSchemaError(StoreError):
    """A newer qnnfarm wrote the results database."""

    def __init__(self, location: str, found: int, supported: int) -> None:
        super().__init__(location, found, supported)
        self.location = location
        self.found = found
        self.supported = supported

    def __str__(self) -> str:
        return (
            f"{self.location} has schema {self.found}, newer than the {self.supported} "
            "that this qnnfarm knows: update qnnfarm"
        )


class StoreLockedError(StoreError):
    """Another process kept the results database locked for too long."""

    def __init__(self, location: str, waited_s: float) -> None:
        super().__init__(location, waited_s)
        self.location = location
        self.waited_s = waited_s

    def __str__(self) -> str:
        return (
            f"{self.location} stayed locked by another process for {self.waited_s:g} s: "
            "try again once it is done"
        )


class StoreUnavailableError(StoreError):
    """The results database cannot be reached, read or written."""

    def __init__(self, location: str, reason: str) -> None:
        super().__init__(location, reason)
        self.location = location
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot use the results database {self.location}: {self.reason}"


class UnknownRunError(StoreError):
    """The results database holds no run of that identifier."""

    exit_code = 2

    def __init__(self, location: str, run_id: str) -> None:
        super().__init__(location, run_id)
        self.location = location
        self.run_id = run_id

    def __str__(self) -> str:
        return f"{self.location} holds no run {self.run_id!r}"


class RunConflictError(StoreError):
    """A write contradicts what the results database already holds of the run."""

    def __init__(self, location: str, run_id: str, reason: str) -> None:
        super().__init__(location, run_id, reason)
        self.location = location
        self.run_id = run_id
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot write run {self.run_id} to {self.location}: {self.reason}"


class CorruptRunError(StoreError):
    """A run in the results database is not one that qnnfarm can have written."""

    def __init__(self, location: str, run_id: str, reason: str) -> None:
        super().__init__(location, run_id, reason)
        self.location = location
        self.run_id = run_id
        self.reason = reason

    def __str__(self) -> str:
        return f"run {self.run_id} in {self.location} is damaged: {self.reason}"


class UnknownMetricError(StoreError):
    """A metric that is not registered."""

    exit_code = 2

    def __init__(self, key: str, known: tuple[str, ...]) -> None:
        super().__init__(key, known)
        self.key = key
        self.known = known

    def __str__(self) -> str:
        return f"unknown metric {self.key!r}: known are {', '.join(self.known)}"


class MetricValueError(StoreError):
    """A value that its metric cannot have."""

    def __init__(self, key: str, value: float, legal: str) -> None:
        super().__init__(key, value, legal)
        self.key = key
        self.value = value
        self.legal = legal

    def __str__(self) -> str:
        return f"{self.key} cannot be {self.value:g}: legal is {self.legal}"


def one_line(text: str, limit: int = 300) -> str:
    """`text` from outside, fit for one line of a message: control characters as spaces, cut."""
    flat = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return flat if len(flat) <= limit else f"…{flat[-limit:]}"


class AdbServerError(HarnessError):
    """The adb server cannot be reached or started, or what answers is no adb server."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(address, reason)
        self.address = address
        self.reason = reason

    def __str__(self) -> str:
        return f"adb server {self.address}: {one_line(self.reason)}"


class AdbAddressError(AdbServerError):
    """An environment variable names an adb server in a way that cannot be used."""

    exit_code = 2

    def __init__(self, variable: str, value: str, reason: str) -> None:
        super().__init__(value, reason)
        self.args = (variable, value, reason)
        self.variable = variable
        self.value = value

    def __str__(self) -> str:
        return f"{self.variable}={self.value!r} cannot be used: {one_line(self.reason)}"


class NoDeviceError(HarnessError):
    """There is no device to use, or not the one that was asked for.

    Attributes:
        wanted: the serial that was asked for, if one was.
        present: `serial (state)` of each device that the adb server does know.
    """

    def __init__(self, wanted: str | None, present: tuple[str, ...] = ()) -> None:
        super().__init__(wanted, present)
        self.wanted = wanted
        self.present = present

    def __str__(self) -> str:
        what = "no adb device" if self.wanted is None else f"no adb device {self.wanted!r}"
        has = f"; connected: {', '.join(self.present)}" if self.present else ""
        return (
            f"{what}{has}: plug a phone in with USB debugging on, "
            "or start a virtual device with `qnnfarm device start NAME --soc SM8750`"
        )


class SeveralDevicesError(HarnessError):
    """No device was named, and more than one could be meant."""

    exit_code = 2

    def __init__(self, serials: tuple[str, ...]) -> None:
        super().__init__(serials)
        self.serials = serials

    def __str__(self) -> str:
        return (
            f"{len(self.serials)} adb devices are connected: choose one with --device or "
            f"ANDROID_SERIAL: {', '.join(self.serials)}"
        )


class DeviceError(HarnessError):
    """Root of what one device does wrong.

    Attributes:
        serial: the device, by the name under which the adb server knows it.
    """

    def __init__(self, serial: str, *details: object) -> None:
        super().__init__(serial, *details)
        self.serial = serial


class DeviceConnectError(DeviceError):
    """The adb server could not connect to a TCP device."""

    def __init__(self, serial: str, reason: str) -> None:
        super().__init__(serial, reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot connect to device {self.serial}: {one_line(self.reason)}"


class DeviceUnauthorizedError(DeviceError):
    """The device does not accept this host's adb key."""

    def __str__(self) -> str:
        return (
            f"device {self.serial} does not accept this host's adb key: confirm the dialog on its "
            "screen, or start it as the user whose key it holds"
        )


class DeviceLostError(DeviceError):
    """The device went away, or is offline, in the middle of something.

    Attributes:
        action: what was being done.
    """

    def __init__(self, serial: str, action: str, reason: str) -> None:
        super().__init__(serial, action, reason)
        self.action = action
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"device {self.serial} went away during {one_line(self.action)}: "
            f"{one_line(self.reason)}"
        )


class DeviceTimeoutError(DeviceError):
    """Something on the device took longer than it may."""

    def __init__(self, serial: str, action: str, timeout_s: float, log_tail: str = "") -> None:
        super().__init__(serial, action, timeout_s, log_tail)
        self.action = action
        self.timeout_s = timeout_s
        self.log_tail = log_tail

    def __str__(self) -> str:
        tail = f"; last output: {one_line(self.log_tail)}" if self.log_tail.strip() else ""
        return (
            f"device {self.serial}: {one_line(self.action)} took longer than "
            f"{self.timeout_s:g} s{tail}"
        )


class DeviceCommandError(DeviceError):
    """A command on the device failed.

    Attributes:
        log_tail: the end of what the command wrote, stderr first choice.
    """

    def __init__(self, serial: str, command: str, exit_status: int, log_tail: str) -> None:
        super().__init__(serial, command, exit_status, log_tail)
        self.command = command
        self.exit_status = exit_status
        self.log_tail = log_tail

    def __str__(self) -> str:
        tail = one_line(self.log_tail) or "it wrote nothing"
        return (
            f"device {self.serial}: `{one_line(self.command, 120)}` failed with status "
            f"{self.exit_status}: {tail}"
        )


class DeviceTransferError(DeviceError):
    """The device refused to take or give a file, or gave what cannot be."""

    def __init__(self, serial: str, path: str, reason: str) -> None:
        super().__init__(serial, path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"device {self.serial}, file {self.path!r}: {one_line(self.reason)}"


class DevicePathError(DeviceTransferError):
    """A path on the device does not exist, or is a folder where a file is meant."""


class DevicePermissionError(DeviceTransferError):
    """The device's shell user may not write or read a path."""


class DeviceFullError(DeviceError):
    """The device has not the space that is needed.

    Attributes:
        needed_bytes: what was to be written; `None` where the device only said that it is full.
        free_bytes: what it had free.
    """

    def __init__(
        self, serial: str, path: str, needed_bytes: int | None, free_bytes: int | None
    ) -> None:
        super().__init__(serial, path, needed_bytes, free_bytes)
        self.path = path
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes

    def __str__(self) -> str:
        needed = "" if self.needed_bytes is None else f", {self.needed_bytes:,} bytes needed"
        free = "" if self.free_bytes is None else f", {self.free_bytes:,} free"
        where = f"device {self.serial} is full at {one_line(self.path)}"
        return f"{where}{needed}{free}: remove files from it"


class DeploymentCorruptError(DeviceError):
    """A file arrived on the device as something else than was sent; it was removed there."""

    def __init__(self, serial: str, name: str, expected: str, found: str) -> None:
        super().__init__(serial, name, expected, found)
        self.name = name
        self.expected = expected
        self.found = found

    def __str__(self) -> str:
        return (
            f"device {self.serial} holds {self.name!r} with SHA-256 "
            f"{one_line(self.found) or 'unknown'} after the push of {self.expected!r}: "
            "its storage or cable is at fault"
        )


class HostFileError(HarnessError):
    """A file of this host is missing, unreadable, no file, or changes while it is used."""

    exit_code = 2

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot use the file {self.path!r}: {one_line(self.reason)}"


class VirtualDeviceError(HarnessError):
    """Root of what virtual devices raise."""


class VirtualDeviceNameError(VirtualDeviceError):
    """A name that no virtual device can have."""

    exit_code = 2

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return (
            f"a virtual device cannot be named {one_line(self.name, 80)!r}: use up to 40 letters, "
            "digits, `-` and `_`, with a letter or digit first"
        )


class UnknownVirtualDeviceError(VirtualDeviceError):
    """There is no virtual device of that name."""

    exit_code = 2

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__(name, known)
        self.name = name
        self.known = known

    def __str__(self) -> str:
        known = f"known are {', '.join(self.known)}" if self.known else "there are none yet"
        return f"no virtual device {self.name!r}: {known}"


class VirtualDeviceChangeError(VirtualDeviceError):
    """A virtual device exists already, made otherwise than is asked for now."""

    exit_code = 2

    def __init__(self, name: str, what: str, made_with: str, wanted: str) -> None:
        super().__init__(name, what, made_with, wanted)
        self.name = name
        self.what = what
        self.made_with = made_with
        self.wanted = wanted

    def __str__(self) -> str:
        return (
            f"virtual device {self.name} exists with {self.what} {self.made_with}, not "
            f"{self.wanted}: choose another name, or `qnnfarm device rm {self.name}` first"
        )


class VirtualDeviceRecordError(VirtualDeviceError):
    """The record of a virtual device cannot be read."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"record of a virtual device {self.path} cannot be used: {one_line(self.reason)}"


class VirtualDeviceStartError(VirtualDeviceError):
    """The process of a virtual device did not come up.

    Attributes:
        log_tail: the end of the log that the process wrote.
    """

    def __init__(self, name: str, reason: str, log_tail: str, log_path: str) -> None:
        super().__init__(name, reason, log_tail, log_path)
        self.name = name
        self.reason = reason
        self.log_tail = log_tail
        self.log_path = log_path

    def __str__(self) -> str:
        tail = f": {one_line(self.log_tail)}" if self.log_tail.strip() else ""
        return (
            f"virtual device {self.name} did not start: {self.reason}{tail} (log {self.log_path})"
        )


class VirtualDeviceBusyError(VirtualDeviceError):
    """Another command has been working on the virtual device for too long."""

    def __init__(self, name: str, waited_s: float) -> None:
        super().__init__(name, waited_s)
        self.name = name
        self.waited_s = waited_s

    def __str__(self) -> str:
        return (
            f"virtual device {self.name}: another command has held it for {self.waited_s:g} s: "
            "try again once that is done"
        )


class AdbKeyError(VirtualDeviceError):
    """A file or message that holds no usable adb key."""


class AdbProtocolError(VirtualDeviceError):
    """A peer that does not keep to the ADB protocol; its connection is closed."""


class WrongUseError(HarnessError):
    """An option or argument that cannot be used as it was given."""

    exit_code = 2

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class RuntimeChoiceError(HarnessError):
    """No runtime can run this container on this device."""

    exit_code = 2

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(device, reason)
        self.device = device
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot run on {self.device}: {self.reason}"


class PromptTooLongError(HarnessError):
    """Prompt and answer do not fit into the context.

    Attributes:
        prompt_tokens: with the bos that the runtime puts before them.
        most_prompt: tokens that a prompt may have, with bos.
        context: tokens that prompt and answer may have together.
    """

    exit_code = 2

    def __init__(self, prompt_tokens: int, new_tokens: int, most_prompt: int, context: int) -> None:
        super().__init__(prompt_tokens, new_tokens, most_prompt, context)
        self.prompt_tokens = prompt_tokens
        self.new_tokens = new_tokens
        self.most_prompt = most_prompt
        self.context = context

    def __str__(self) -> str:
        return (
            f"the prompt has {self.prompt_tokens} tokens (with bos), and {self.new_tokens} are to "
            f"be generated: this container takes prompts of up to {self.most_prompt}, and "
            f"{self.context} tokens in all"
        )


class RunnerError(DeviceError):
    """The runner on the device crashed, hung or refused its input.

    Attributes:
        reason: how it ended, in words.
        exit_status: of the runner; 128 + n when signal n ended it.
    """

    def __init__(
        self, serial: str, command: str, reason: str, exit_status: int | None, log_tail: str
    ) -> None:
        super().__init__(serial, command, reason, exit_status, log_tail)
        self.command = command
        self.reason = reason
        self.exit_status = exit_status
        self.log_tail = log_tail

    def __str__(self) -> str:
        lines = self.log_tail.strip().splitlines()
        said = f"; it said: {one_line(lines[-1])[:300]}" if lines else ""
        return f"device {self.serial}: {one_line(self.command)} {one_line(self.reason)}{said}"


class RuntimeOutputError(DeviceError):
    """The runner on the device printed or wrote what cannot be its answer."""

    def __init__(self, serial: str, reason: str, log_tail: str) -> None:
        super().__init__(serial, reason, log_tail)
        self.reason = reason
        self.log_tail = log_tail

    def __str__(self) -> str:
        return f"device {self.serial}: {one_line(self.reason)}"
