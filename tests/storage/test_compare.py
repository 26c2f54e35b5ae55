"""SQLite answers as the memory store does, after any batches and restarts."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gqueue.model import State
from tests.model.rig import examples
from tests.storage.stores import NOW, Loaded, Store, row

SEQS = st.integers(1, 12)
QUEUES = st.sampled_from(["q", "other"])
FINISHED = (State.COMPLETED, State.FAILED)


class Compared(RuleBasedStateMachine):
    """The same batches to both."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.stores = [Store(variant, Path(self.folder.name)) for variant in ("memory", "sqlite-commit")]
        self.known: dict[int, Any] = {}  # seq -> (id, queue), which never change
        self.entries = 0

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        self.folder.cleanup()

    def _both(self, **changes: Any) -> None:
        for store in self.stores:
            store.commit(**changes)

    @initialize()
    def begin(self) -> None:
        self._both(jobs=[row(1)])
        self.known[1] = "q"

    @rule(
        jobs=st.dictionaries(
            SEQS,
            st.tuples(st.sampled_from(list(State)), QUEUES, st.sampled_from([1, 200, 5000]), st.integers(0, 4)),
            max_size=6,
        ),
        removed=st.sets(SEQS, max_size=3),
        obliterated=st.lists(st.tuples(QUEUES, SEQS), max_size=1),
        keep_data=st.booleans(),
    )
    def batch(self, jobs: Any, removed: Any, obliterated: Any, keep_data: bool) -> None:
        for queue, last in obliterated:
            self.known = {seq: of for seq, of in self.known.items() if of != queue or seq > last}
        for seq in removed - set(jobs):
            self.known.pop(seq, None)
        rows = []
        for seq, (state, queue, size, at) in jobs.items():
            old = self.known.get(seq)
            data = None if keep_data and old else b"\xc5" + bytes([seq]) * size
            ended = NOW + at if state in FINISHED else None
            rows.append(row(seq, state, queue=old or queue, data=data, created_at=NOW + seq % 2, finished_at=ended))
            self.known.setdefault(seq, queue)
        self.entries += 1
        logs = [(seq, self.entries, b"%d" % self.entries) for seq in jobs]
        self._both(jobs=rows, removed=sorted(removed - set(jobs)), obliterated=obliterated, logs=logs)

    @rule(seq=SEQS, first=st.integers(0, 20))
    def trim(self, seq: int, first: int) -> None:
        self._both(logs_trimmed=[(seq, first)])

    @rule(name=st.sampled_from("ab"), value=st.sampled_from([None, b"1", b"2"]))
    def name(self, name: str, value: bytes | None) -> None:
        self._both(queues={name: value}, proofs={name: value}, meta={name: value})

    @rule(completed=st.integers(0, 12))
    def restart(self, completed: int) -> None:
        first, second = (self._comparable(store.reopen(completed)) for store in self.stores)
        assert second == first

    def _comparable(self, loaded: Loaded) -> Loaded:
        """A store may give logs of jobs that it has not loaded; nobody asks for them there."""
        seqs = {one.seq for one in loaded.rows}
        loaded.logs = sorted(entry for entry in loaded.logs if entry[0] in seqs)
        return loaded

    @invariant()
    def every_read_is_the_same(self) -> None:
        ids = [f"id-{seq:06}" for seq in range(1, 13)]
        answers = [
            (
                sorted(store.storage.find(ids)),
                sorted(store.storage.logs_of(range(1, 13))),
                [
                    store.storage.page(q, s, limit=3, asc=asc)
                    for q in ("q", "other")
                    for s in FINISHED
                    for asc in (0, 1)
                ],
                [store.storage.oldest(q, s, until=NOW + 2, limit=3) for q in ("q", None) for s in FINISHED],
            )
            for store in self.stores
        ]
        assert answers[1] == answers[0]


Compared.TestCase.settings = examples(40, steps=20)
TestCompared = Compared.TestCase
