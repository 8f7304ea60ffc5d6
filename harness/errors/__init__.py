"""Errors of `harness`: one root, each with its data.

    HarnessError
      WrongUseError            an option or argument that cannot be used
      HostFileError            a file of this host that cannot be read or written
      RuntimeChoiceError       no runtime fits the container and the device
      GenieMissingError        this machine lacks Genie's libraries
      LibrariesFetchError
      PromptTooLongError
      ConfigFileError          a plan, a pool or a recipe that cannot be used
      PipelineError            a pipeline cannot do that
      AdbServerError
      NoDeviceError
      SeveralDevicesError
      HostError                root of failures of a host over SSH
        HostUnreachableError
        HostAuthError          it accepts none of the keys
      DeviceError              root of failures on one device
        DeviceConnectError
        DeviceUnauthorizedError
        DeviceLostError        it went away in the middle
        DeviceNotReadyError    offline, in recovery, or the like
        DeviceTimeoutError
        DeviceCommandError     a command on it failed
        DeviceTransferError    it refused a file
        DeviceFullError
        DeviceUnsupportedError    devices of its type cannot do this
        DeploymentCorruptError
        ConditionsNotMetError  too hot, or with the wrong charge, for a measured run
        RunnerError            the runner on the device failed
        RuntimeOutputError     the runner printed or wrote garbage
      PoolError                root of a pool's errors
        UnknownMemberError
        RequirementError       no device can ever meet it
        LeaseTimeoutError
        LeaseLostError         another process may hold the device now
        DeviceHeldError        a holder of another ledger has it
        NotificationError      a webhook, a command or mail did not take one
        LedgerError            the file of all leases cannot be used
      StoreError               root of the results store's errors
        MissingStoreError      no database to read
        StoreUnavailableError  cannot be reached, read or written
          StoreLostError   its server went away
        NotStoredError         no such run or alert, or nothing that a gate can compare with
        RunConflictError       contradicts the stored run
        CorruptRunError        not written by qnnfarm
        MetricError            not registered, or a value that it cannot have
        TelemetryRecordError   an invalid series of samples
        ArtifactError          a file that is kept with a run cannot be kept or read
      OutputCheckError         a speed with a wrong output
      NightlyBusyError         another process works on the night of a plan
      VirtualDeviceError       root of virtual devices' errors
        UnknownVirtualDeviceError
        VirtualDeviceConfinementError   this machine grants no namespace
        AdbProtocolError       a peer that does not speak ADB

`str(error)` is one line for the user: the fault, its place, and advice.
"""

from buildlib.error_base import one_line as one_line
from harness.errors.base import *  # noqa: F403
from harness.errors.devices import *  # noqa: F403
from harness.errors.farm import *  # noqa: F403
from harness.errors.results import *  # noqa: F403
