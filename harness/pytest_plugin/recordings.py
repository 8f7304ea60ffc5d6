"""Recordings of the runs of one test, in the results store."""

import uuid
from dataclasses import dataclass, field

from harness.results.records import Run
from harness.results.store import LazyResultsStore, RunFilter
from harness.workloads.base import Recording
from harness.workloads.session import Session


@dataclass(frozen=True, slots=True)
class TestRecordings:
    """Makes the recordings of a test's workloads: `bench.run(session, recording("pp512"))`.

    Attributes:
        run_uid: the same in all processes of one run of pytest, and in no other run.
        number: of the test among its `--repeat` sessions, from 0.
        case: the test with its parameters, the same in all sessions.
        label: of its runs in the store, unless they have one of their own.
        group_ids: of the recordings that were made.
    """

    __test__ = False

    store: LazyResultsStore
    session: Session
    run_uid: str
    number: int
    case: str
    label: str
    group_ids: list[str] = field(default_factory=list)

    def __call__(self, label: str = "") -> Recording:
        """Make the recording of one more run; `--repeat` sessions share its group.

        Args:
            label: of the run in the store.
        """
        label = label or self.label
        group_id = self.group_id(label, len(self.group_ids))
        self.group_ids.append(group_id)
        return Recording(self.store.open, group_id, self.number, label)

    def group_id(self, *work: object) -> str:
        """Return the id that all sessions of a workload of this test share on a kind of device.

        It is another in another run of pytest.
        """
        device, model = self.session.device_info, self.session.model
        kind = (model.info.sha256, model.runtime.name, device.soc, device.emulator)
        text = "\n".join(map(str, (self.run_uid, *kind, self.case, *work)))
        return uuid.uuid5(uuid.NAMESPACE_URL, text).hex

    def runs(self) -> tuple[Run, ...]:
        """Return the runs that were recorded, but for those of other sessions."""
        store = self.store.existing
        if store is None:
            return ()
        return store.list_runs(RunFilter(group_ids=self.group_ids, sessions=(self.number,)))
