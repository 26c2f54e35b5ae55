"""What every store must do. A new one passes when its URL is in VARIANTS."""

from __future__ import annotations

import pytest

from gqueue.model import State
from gqueue.storage.base import Batch
from tests.storage.stores import NOW, Store, by, row

LARGE = b"\xc5\x75\x30" + bytes(30_000)  # kept beside its row, where a store makes a difference


def test_a_new_store_is_empty(store: Store) -> None:
    loaded = store.reopen()
    assert (loaded.number, loaded.seq, loaded.rows, loaded.logs, loaded.completed) == (0, 0, [], [], {})
    assert (loaded.meta, loaded.queues, loaded.proofs) == ({}, {}, {})


def test_a_batch_is_there_with_every_field_after_the_next_start(store: Store) -> None:
    rows = [
        row(1, priority=-5, run_at=NOW + 9, attempts=2, started_at=NOW + 1, rest=b"\x81\xa1a\x01"),
        row(2, State.BLOCKED, id='it\'s "2"; --', queue="a.b:c-d_E", name="имя"),
        row(3, State.ACTIVE, started_at=NOW),
        row(4, State.FAILED, data=b"\xc4\x03\x00\xff\x01"),
        row(5, State.COMPLETED, result=b"\xc3"),
    ]
    store.commit(
        jobs=rows, logs=[(1, 0, b"a"), (1, 1, b"b")], queues={"q": b"s"}, proofs={"p": b"\xc0"}, meta={"m": b"v"}
    )
    loaded = store.reopen()
    assert loaded.rows == rows
    assert loaded.logs == [(1, 0, b"a"), (1, 1, b"b")]
    assert (loaded.queues, loaded.proofs, loaded.meta) == ({"q": b"s"}, {"p": b"\xc0"}, {"m": b"v"})
    assert (loaded.number, loaded.seq, loaded.completed) == (1, 5, {"q": 1})


def test_a_later_row_replaces_the_one_of_its_seq(store: Store) -> None:
    store.commit(jobs=[row(1)])
    changed = row(1, State.ACTIVE, attempts=1, started_at=NOW + 5, rest=b"\x80", data=b"\xa1y")
    store.commit(jobs=[changed])
    assert store.reopen().rows == [changed]


@pytest.mark.parametrize("data", [b"\xa1x", LARGE], ids=["small", "large"])
def test_a_row_without_data_leaves_the_stored_payload(store: Store, data: bytes) -> None:
    store.commit(jobs=[row(1, data=data)])
    store.commit(jobs=[row(1, State.COMPLETED, data=None, result=b"\xc2")])
    expected = row(1, State.COMPLETED, data=data, result=b"\xc2")
    assert store.storage.find(["id-000001"]) == [expected]
    assert store.reopen().rows == [expected]


@pytest.mark.parametrize(("first", "second"), [(b"\xa1x", LARGE), (LARGE, b"\xa1y"), (LARGE, LARGE[:-1] + b"\x01")])
def test_a_payload_may_grow_and_shrink(store: Store, first: bytes, second: bytes) -> None:
    store.commit(jobs=[row(1, data=first)])
    store.commit(jobs=[row(1, data=second)])
    assert store.reopen().rows == [row(1, data=second)]


def test_a_removed_job_takes_its_logs_and_its_payload_with_it(store: Store) -> None:
    store.commit(jobs=[row(1, data=LARGE), row(2)], logs=[(1, 0, b"a"), (2, 0, b"b")])
    store.commit(removed=[1])
    store.commit(jobs=[row(3)])
    loaded = store.reopen()
    assert by(loaded.rows) == [2, 3]
    assert loaded.logs == [(2, 0, b"b")]
    store.commit(jobs=[row(1, data=b"\xa1z")])
    assert store.reopen().rows[0] == row(1, data=b"\xa1z")


def test_the_highest_seq_is_remembered_when_its_job_is_gone(store: Store) -> None:
    store.commit(jobs=[row(1), row(7)])
    store.commit(removed=[7])
    assert store.reopen().seq == 7


def test_an_obliterated_queue_loses_what_was_there_and_not_what_comes_with_it(store: Store) -> None:
    store.commit(jobs=[row(1), row(2, State.COMPLETED, data=LARGE), row(3, queue="other"), row(4)], logs=[(1, 0, b"a")])
    store.commit(obliterated=[("q", 4)], jobs=[row(5)], logs=[(5, 0, b"e")])
    loaded = store.reopen()
    assert by(loaded.rows) == [3, 5]
    assert loaded.logs == [(5, 0, b"e")]
    store.commit(obliterated=[("q", 4)])
    assert by(store.reopen().rows) == [3, 5]


def test_logs_are_added_and_trimmed(store: Store) -> None:
    store.commit(jobs=[row(1), row(2)], logs=[(1, n, b"%d" % n) for n in range(5)] + [(2, 0, b"x")])
    store.commit(logs=[(1, 5, b"5")], logs_trimmed=[(1, 3)])
    assert store.storage.logs_of([1]) == [(1, b"3"), (1, b"4"), (1, b"5")]
    assert store.storage.logs_of([2, 1]) in (
        [(2, b"x"), (1, b"3"), (1, b"4"), (1, b"5")],
        [(1, b"3"), (1, b"4"), (1, b"5"), (2, b"x")],
    )
    assert store.storage.logs_of([9]) == []


def test_settings_proofs_and_meta_are_replaced_and_forgotten(store: Store) -> None:
    store.commit(queues={"a": b"1", "b": b"1"}, proofs={"p": b"1", "r": b"1"}, meta={"k": b"1", "l": b"1"})
    store.commit(queues={"a": None, "b": b"2"}, proofs={"p": None, "r": b"2"}, meta={"k": None, "l": b"2"})
    loaded = store.reopen()
    assert (loaded.queues, loaded.proofs, loaded.meta) == ({"b": b"2"}, {"r": b"2"}, {"l": b"2"})


def test_a_batch_that_is_sent_again_changes_nothing(store: Store) -> None:
    batch = store.commit(jobs=[row(1)])
    store.commit(removed=[1])
    store.send(batch)
    loaded = store.reopen()
    assert (loaded.number, loaded.rows) == (2, [])
    store.send(Batch(2, jobs=[row(9)]))
    assert store.reopen().rows == []


def test_more_rows_than_one_statement_takes(store: Store) -> None:
    store.commit(jobs=[row(n) for n in range(1, 2_502)])
    store.commit(jobs=[row(n, State.COMPLETED, data=None) for n in range(1, 2_502)])
    assert by(store.storage.find([f"id-{n:06}" for n in range(2_400, 2_600)])) == list(range(2_400, 2_502))
    loaded = store.reopen()
    assert loaded.rows == [row(n, State.COMPLETED) for n in range(1, 2_502)]
    store.commit(removed=list(range(1, 2_501)))
    assert by(store.reopen().rows) == [2_501]


def test_a_start_loads_live_and_failed_jobs_by_seq_and_then_the_newest_completed_ones(store: Store) -> None:
    ends = {2: 50, 4: 10, 6: 30, 8: 50}  # seq -> when it ended
    store.commit(
        jobs=[row(n, State.COMPLETED, finished_at=NOW + at) for n, at in ends.items()]
        + [row(5, State.FAILED), row(3, State.BLOCKED), row(1), row(7, State.ACTIVE)]
    )
    assert by(store.reopen().rows) == [1, 3, 5, 7, 4, 6, 2, 8]
    loaded = store.reopen(completed=2)
    assert by(loaded.rows) == [1, 3, 5, 7, 2, 8]
    assert loaded.completed == {"q": 4}
    assert by(store.reopen(completed=0).rows) == [1, 3, 5, 7]


def test_find_gives_finished_jobs_only(store: Store) -> None:
    store.commit(jobs=[row(1), row(2, State.COMPLETED), row(3, State.FAILED), row(4, State.ACTIVE)])
    assert sorted(by(store.storage.find(["id-000001", "id-000002", "id-000003", "id-000004", "none"]))) == [2, 3]
    assert store.storage.find([]) == []


def test_a_page_is_ordered_by_creation_and_id(store: Store) -> None:
    store.commit(
        jobs=[
            row(1, State.COMPLETED, created_at=NOW + 2),
            row(2, State.COMPLETED, id="b"),
            row(3, State.COMPLETED, id="a"),
            row(4, State.COMPLETED, queue="other"),
            row(5, State.FAILED),
            row(6),
        ]
    )
    page = store.storage.page
    assert by(page("q", State.COMPLETED, limit=10, asc=True)) == [3, 2, 1]
    assert by(page("q", State.COMPLETED, limit=2, asc=True)) == [3, 2]
    assert by(page("q", State.COMPLETED, limit=2, asc=False)) == [1, 2]
    assert by(page("q", State.FAILED, limit=10, asc=True)) == [5]
    assert page("none", State.COMPLETED, limit=10, asc=True) == []


def test_the_oldest_are_those_that_ended_first(store: Store) -> None:
    store.commit(
        jobs=[
            row(1, State.COMPLETED, finished_at=NOW + 3),
            row(2, State.COMPLETED, finished_at=NOW + 1),
            row(3, State.COMPLETED, finished_at=NOW + 1, queue="other"),
            row(4, State.COMPLETED, finished_at=NOW + 2),
            row(5, State.FAILED, finished_at=NOW),
            row(6),
        ]
    )
    oldest = store.storage.oldest
    assert by(oldest(None, State.COMPLETED, until=NOW + 2, limit=10)) == [2, 3, 4]
    assert by(oldest("q", State.COMPLETED, until=NOW + 3, limit=2)) == [2, 4]
    assert by(oldest("q", State.FAILED, until=NOW, limit=10)) == [5]
    assert oldest("q", State.COMPLETED, until=NOW, limit=10) == []


def test_the_figures_name_the_kind_and_no_more_than_json_holds(store: Store) -> None:
    status = store.storage.status()
    assert status["kind"] == store.storage.kind
    assert {type(value) for value in status.values()} <= {str, int, bool}


def test_it_can_be_closed_twice(store: Store) -> None:
    store.commit(jobs=[row(1)])
    store.storage.close()
    store.storage.close()


def test_a_batch_survives_the_way_to_another_process() -> None:
    batch = Batch(
        7,
        jobs=[row(1, data=None, rest=b"\x80"), row(2, data=b"\x00\xff")],
        removed=[3],
        obliterated=[("q", 2)],
        logs=[(1, 0, b"x")],
        logs_trimmed=[(1, 0)],
        queues={"q": None},
        proofs={"p": b"\xc0"},
        meta={"m": b""},
        durable=True,
    )
    assert Batch.unpack(batch.pack()) == batch
