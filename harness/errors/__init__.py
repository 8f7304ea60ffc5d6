"""Errors of `harness`: one root, each with the data of what went wrong.

    HarnessError
      WrongUseError            an option or argument that cannot be used
      HostFileError            a file of this host that cannot be read or written
      ConfigurationLimitError  a Genie configuration that its target cannot run
      RuntimeChoiceError       no runtime fits the container and the device
      GenieMissingError        this machine lacks Genie's libraries
      LibrariesFetchError
      PromptTooLongError
      PipelineError            root of what is wrong with a pipeline
        RecipeError            a recipe, or a stage's configuration, that cannot be used
        PipelineStateError     its finished stages cannot give what is asked
        ManifestError          no manifest, or none that can be read
        ModelHubError          a model cannot be had from the hub
      AdbServerError
        AdbAddressError        an environment variable that cannot be used
      NoDeviceError
      SeveralDevicesError
      DeviceSpecError          a text that names no device
      ConditionsError          a condition of measured runs that cannot be used
      HostError                root of what goes wrong with a host over SSH
        HostConfigError        its SSH configuration cannot be used
        HostUnreachableError
        HostKeyError           its key is unknown
          HostCertificateError only an authority of certificates is known
          HostKeyChangedError  its key differs from the known one
          HostKeyRevokedError  its key is revoked
        HostAuthError          it accepts none of the keys
      DeviceError              root of what goes wrong on one device
        DeviceConnectError
        DeviceUnauthorizedError
        DeviceLostError        it went away in the middle
        DeviceNotReadyError    offline, in recovery, or the like
        DeviceTimeoutError
        DeviceCommandError     a command on it failed
        DeviceTransferError    it refused a file
          DevicePathError
          DevicePermissionError
        DeviceFullError
        DeviceUnsupportedError    devices of its type cannot do this
        DeploymentCorruptError
        ConditionsNotMetError  too hot, or with the wrong charge, for a measured run
        RunnerError            the runner on the device failed
        RuntimeOutputError     the runner printed or wrote garbage
      PoolError                root of what a pool raises
        PoolConfigError        a pool.yaml that cannot be used
        UnknownMemberError
        MemberStateError       not possible in the state of the device
        RequirementError       no device can ever meet it
        LeaseTimeoutError
        LeaseLostError         another process may hold the device now
        DeviceHeldError        a holder of another ledger has it
        RecoveryStepError      skipped, or without effect
        NotificationError      a webhook, a command or mail did not take one
        HubError               a USB hub cannot be switched, or must not be
        LedgerError            the file of all leases cannot be used
          DamagedLedgerError
          NewerLedgerError
      StoreError               root of what the results store raises
        MissingStoreError      no database to read
        NotAStoreError         some other file, or a damaged one
        NewerSchemaError       written by a newer qnnfarm
        OlderSchemaError       written by an older one
        StoreLockedError       another process holds it
        StoreUnavailableError  cannot be reached, read or written
          StoreLostError   its server went away
        UnknownRunError
        NoBaselineError        nothing that a gate can compare with
        UnknownAlertError
        RunConflictError       contradicts what is stored
        CorruptRunError        not written by qnnfarm
        UnknownMetricError
        MetricValueError
        TelemetryRecordError   an invalid series of samples
        ArtifactError          a file that is kept with a run cannot be kept or read
        ImportedFileError      a file of another tool cannot be imported
      OutputCheckError         a speed with a wrong output
      PlanError                root of what is wrong with a plan or its run
        PlanFileError          a plan that cannot be used
        PlanBusyError          another process runs it
        NightlyBusyError       another process works on its night
        NightlyFolderError     the folder of its nights cannot be used
        JournalError           its journal cannot be read or written
        NoDeviceForCellError   no device was free in time
      VirtualDeviceError       root of what virtual devices raise
        VirtualDeviceNameError
        UnknownVirtualDeviceError
        VirtualDeviceChangeError    it exists with another SoC, size or confinement
        VirtualDeviceRecordError    a damaged record, or a newer qnnfarm's
        VirtualDeviceConfinementError   this machine grants no namespace
        VirtualDeviceStartError
        VirtualDeviceBusyError      another command works on it
        VirtualDeviceControlError   it does not run, or refuses
        VirtualHostError       the process of several devices did not start
        FaultSpecError         a text that is no fault
        HeatSettingError       a value that the heat model cannot have
        AdbKeyError            a file that holds no usable adb key
        AdbProtocolError       a peer that does not speak ADB

`str(error)` is one line for the user: what is wrong, where, and what to do.
"""

from buildlib.error_base import one_line as one_line
from harness.errors.base import *  # noqa: F403
from harness.errors.devices import *  # noqa: F403
from harness.errors.farm import *  # noqa: F403
from harness.errors.results import *  # noqa: F403
