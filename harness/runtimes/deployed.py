"""Common part of runtimes on a device: deployment, a run folder, its log, and sampling."""

import contextlib
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial

from buildlib.container.container import GenAIContainer
from harness.deploy.deploy import deploy, remove_run
from harness.deploy.deployment import Deployment
from harness.deploy.push import Progress
from harness.devices.base import DeviceProperties
from harness.devices.device import Device
from harness.errors import HarnessError
from harness.runtimes.base import RuntimeOptions
from harness.runtimes.bundles.bundle import Bundle
from harness.runtimes.bundles.checks import check_bundle
from harness.runtimes.run_folder import RunFolder
from harness.telemetry.sampler import Sampling, sampling

RUN_S = 300.0
"""Limit of an answer, a window or a text on a device."""


def _in_silence(_serial: str) -> AbstractContextManager[Progress]:
    return contextlib.nullcontext(lambda _sent, _total: None)


class DeployedRuntime:
    """Base of runtimes with one run folder on the device.

    Attributes:
        device: only the run folder and the content store on it are touched.
        deployment: on the device; None before `prepare`.
        samples: of the newest command that was sampled.
        bundle: files of a run, the user's included.
    """

    def __init__(
        self,
        device: Device,
        properties: DeviceProperties,
        bundle: Bundle,
        options: RuntimeOptions,
        container: GenAIContainer | None = None,
    ) -> None:
        self.device = device
        self.options = options
        self.bundle = bundle.add(options.push)
        self._check = partial(check_bundle, self.bundle, device, properties, container)
        self._run_id = f"run-{uuid.uuid4().hex}"
        self.deployment: Deployment | None = None
        self.samples = Sampling()
        self._touched = False

    def prepare(self) -> Deployment:
        """Put the files on the device, once; those that are there are not pushed again."""
        if self.deployment is None:
            self._check()
            self._touched = True  # from here on, also when the deployment is interrupted
            display = self.options.shown or _in_silence
            with display(self.device.serial) as on_progress:
                self.deployment = deploy(
                    self.device,
                    self.bundle.files,
                    run_id=self._run_id,
                    timeout_s=self.options.timeout_s,
                    on_progress=on_progress,
                )
        return self.deployment

    def clean(self) -> None:
        """End the processes of the run on the device, and remove its folder.

        A device that is gone has nothing to clean: the content store is verified before its next
        use anyway.
        """
        if self._touched:
            self._touched, self.deployment = False, None
            with contextlib.suppress(HarnessError):
                remove_run(self.device, self._run_id)

    def sha256_of(self, file: str) -> str | None:
        """Return the hash of a deployed file, by its path or its name; deploy first if needed."""
        hashes = {each.name: each.sha256 for each in self.prepare().files}
        by_name = {path.rpartition("/")[2]: sha256 for path, sha256 in hashes.items()}
        return hashes.get(file, by_name.get(file))

    def pushed(self) -> dict[str, str]:
        """Return the hashes of the user's files, as versions; deploy first if needed."""
        return {
            f"pushed {file.name}": f"sha256:{file.sha256[:16]}"
            for file in self.prepare().files
            if file.name in self.options.push
        }

    def read_log(self) -> str:
        """Read the end of the last process's log on the device; empty if there was none."""
        if self.deployment is None:
            return ""
        return RunFolder(self.device, self.deployment).read_log()

    def folder(self) -> RunFolder:
        """Return the run folder; deploy first if needed."""
        return RunFolder(self.device, self.prepare(), self.options.on_running)

    def limit_s(self, queries: int = 1, new_tokens: int = 0) -> float:
        """Return the seconds after which a process on the device is ended.

        Args:
            queries: answers, windows or texts that it is to give.
            new_tokens: that each of them has at most.
        """
        asked = self.options.runner_timeout_s
        return queries * (RUN_S + self._emulated_s(new_tokens) if asked is None else asked)

    def _emulated_s(self, new_tokens: int) -> float:
        """Return what an emulator may take for a query, beside the time of a device."""
        del new_tokens
        return 0.0

    @contextlib.contextmanager
    def sampling(self) -> Iterator[Sampling]:
        """Sample the device while a block runs a command, if that was asked for."""
        hz = self.options.telemetry_hz
        if hz is None:
            yield Sampling()
            return
        deployment = self.prepare()
        where = (deployment.scripts_dir, deployment.run_dir)
        with sampling(self.device, *where, hz=hz) as self.samples:
            yield self.samples
