"""The errors of `harness`: one root, each with the data of what went wrong.

    HarnessError
      WrongUseError            an option or argument that cannot be used
      RuntimeChoiceError       no runtime fits the container and the device
      GenieMissingError        nor its libraries on this machine
      LibrariesFetchError
      PromptTooLongError
      AdbServerError
        AdbAddressError        an environment variable that cannot be used
      NoDeviceError
      SeveralDevicesError
      HostFileError            a file of this host that cannot be read or written
      DeviceSpecError          what names a device cannot
      ConditionsError          a condition of a measured run that cannot be asked for
      HostError                root of what goes wrong with a host over SSH
        HostConfigError        `~/.ssh/config` says what cannot be used
        HostUnreachableError
        HostKeyError           its key is not known
          HostKeyChangedError  it is another than the known one
        HostAuthError          it accepts none of the keys
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
        ConditionsNotMetError  too hot, or with the wrong charge, for a measured run
        DeploymentCorruptError
        DeviceUnsupportedError    devices of its type cannot
        RunnerError            the runner on the device failed
        RuntimeOutputError     the runner printed or wrote garbage
      PoolError                root of what a pool raises
        PoolConfigError        a pool.yaml that cannot be used
        UnknownMemberError
        MemberStateError       not possible in the state that the device is in
        RequirementError       no device could ever meet it
        LeaseTimeoutError
        LeaseLostError         the device may be another's by now
        RecoveryStepError      not taken, or did not help
        LedgerError            the file of all leases cannot be used
          DamagedLedgerError
          NewerLedgerError
      StoreError
        MissingStoreError      no database to read
        NotAStoreError         some other file, or a damaged one
        NewerSchemaError       written by a newer qnnfarm
        OlderSchemaError       written by an older one, and cannot be migrated
        StoreLockedError       another process holds it
        StoreUnavailableError  cannot be reached, read or written
        UnknownRunError
        RunConflictError       contradicts what is stored
        CorruptRunError        not written by qnnfarm
        UnknownMetricError
        MetricValueError
        TelemetryRecordError   a series of samples that cannot be one
      OutputCheckError         a speed with a wrong output
      PlanError                root of what is wrong with a plan or its run
        PlanFileError          a plan that cannot be used
        PlanBusyError          another process runs it
        JournalError           its journal cannot be read or written
        NoDeviceForCellError   no device was free in time
      VirtualDeviceError       root of what virtual devices raise
        VirtualDeviceNameError
        UnknownVirtualDeviceError
        VirtualDeviceChangeError    another SoC or size than it was made with
        VirtualDeviceRecordError    a damaged record, or a newer qnnfarm's
        VirtualDeviceStartError
        VirtualDeviceBusyError      another command works on it
        VirtualDeviceControlError   it does not run, or refuses
        VirtualHostError       the process of several did not come up
        FaultSpecError         a text that is no fault
        HeatSettingError       a value that the heat model cannot have
        AdbKeyError            a file that holds no usable adb key
        AdbProtocolError       a peer that does not speak ADB

`str(error)` is one line for the user: what is wrong, where, and what to do. All data goes to
`super().__init__`, so that every error survives pickling on its way out of a worker process.
"""

from harness.errors.adb import (
    AdbAddressError,
    AdbServerError,
    NoDeviceError,
    SeveralDevicesError,
)
from harness.errors.base import (
    HarnessError,
    HostFileError,
    WrongUseError,
    one_line,
)
from harness.errors.device import (
    DeploymentCorruptError,
    DeviceCommandError,
    DeviceConnectError,
    DeviceError,
    DeviceFullError,
    DeviceLostError,
    DevicePathError,
    DevicePermissionError,
    DeviceSpecError,
    DeviceTimeoutError,
    DeviceTransferError,
    DeviceUnauthorizedError,
    DeviceUnsupportedError,
    RunnerError,
    RuntimeOutputError,
)
from harness.errors.measure import (
    OlderSchemaError,
    OutputCheckError,
    TelemetryRecordError,
)
from harness.errors.plan import (
    JournalError,
    NoDeviceForCellError,
    PlanBusyError,
    PlanError,
    PlanFileError,
)
from harness.errors.pool import (
    DamagedLedgerError,
    LeaseLostError,
    LeaseTimeoutError,
    LedgerError,
    MemberStateError,
    NewerLedgerError,
    PoolConfigError,
    PoolError,
    RecoveryStepError,
    RequirementError,
    UnknownMemberError,
)
from harness.errors.runtime import (
    GenieMissingError,
    LibrariesFetchError,
    PromptTooLongError,
    RuntimeChoiceError,
)
from harness.errors.ssh import (
    HostAuthError,
    HostConfigError,
    HostError,
    HostKeyChangedError,
    HostKeyError,
    HostUnreachableError,
)
from harness.errors.store import (
    CorruptRunError,
    MetricValueError,
    MissingStoreError,
    NewerSchemaError,
    NotAStoreError,
    RunConflictError,
    StoreError,
    StoreLockedError,
    StoreUnavailableError,
    UnknownMetricError,
    UnknownRunError,
)
from harness.errors.telemetry import (
    ConditionsError,
    ConditionsNotMetError,
)
from harness.errors.virtual import (
    AdbKeyError,
    AdbProtocolError,
    FaultSpecError,
    HeatSettingError,
    UnknownVirtualDeviceError,
    VirtualDeviceBusyError,
    VirtualDeviceChangeError,
    VirtualDeviceControlError,
    VirtualDeviceError,
    VirtualDeviceNameError,
    VirtualDeviceRecordError,
    VirtualDeviceStartError,
    VirtualHostError,
)

__all__ = [
    "AdbAddressError",
    "AdbKeyError",
    "AdbProtocolError",
    "AdbServerError",
    "ConditionsError",
    "ConditionsNotMetError",
    "CorruptRunError",
    "DamagedLedgerError",
    "DeploymentCorruptError",
    "DeviceCommandError",
    "DeviceConnectError",
    "DeviceError",
    "DeviceFullError",
    "DeviceLostError",
    "DevicePathError",
    "DevicePermissionError",
    "DeviceSpecError",
    "DeviceTimeoutError",
    "DeviceTransferError",
    "DeviceUnauthorizedError",
    "DeviceUnsupportedError",
    "FaultSpecError",
    "GenieMissingError",
    "HarnessError",
    "HeatSettingError",
    "HostAuthError",
    "HostConfigError",
    "HostError",
    "HostFileError",
    "HostKeyChangedError",
    "HostKeyError",
    "HostUnreachableError",
    "JournalError",
    "LeaseLostError",
    "LeaseTimeoutError",
    "LedgerError",
    "LibrariesFetchError",
    "MemberStateError",
    "MetricValueError",
    "MissingStoreError",
    "NewerLedgerError",
    "NewerSchemaError",
    "NoDeviceError",
    "NoDeviceForCellError",
    "NotAStoreError",
    "OlderSchemaError",
    "OutputCheckError",
    "PlanBusyError",
    "PlanError",
    "PlanFileError",
    "PoolConfigError",
    "PoolError",
    "PromptTooLongError",
    "RecoveryStepError",
    "RequirementError",
    "RunConflictError",
    "RunnerError",
    "RuntimeChoiceError",
    "RuntimeOutputError",
    "SeveralDevicesError",
    "StoreError",
    "StoreLockedError",
    "StoreUnavailableError",
    "TelemetryRecordError",
    "UnknownMemberError",
    "UnknownMetricError",
    "UnknownRunError",
    "UnknownVirtualDeviceError",
    "VirtualDeviceBusyError",
    "VirtualDeviceChangeError",
    "VirtualDeviceControlError",
    "VirtualDeviceError",
    "VirtualDeviceNameError",
    "VirtualDeviceRecordError",
    "VirtualDeviceStartError",
    "VirtualHostError",
    "WrongUseError",
    "one_line",
]
