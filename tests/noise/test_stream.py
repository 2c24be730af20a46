"""A row is used once: what a stream refuses, and in which words."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import quell
from quell import QuellError
from quell.noise import Key, Ledger, NoiseSpec, NoiseStream, Shard, UnrecordedKeyWarning, claims
from quell.noise.layout import MOST_ELEMENTS
from quell.strategy.recurrence import Exponentials, Fenwick, Regenerate, Ring

from .cases import spec

Seeded = Callable[[int], Key]


def _zeros(size: int = 8) -> np.ndarray:
    return np.zeros(size, np.float32)


def _short(steps: int = 3, scale: float = 1.0) -> NoiseSpec:
    return NoiseSpec(Regenerate(np.array([1.0, -0.5])), steps, scale)


def _stream(key: Key, noise: NoiseSpec | None = None, **options: object) -> NoiseStream:
    return NoiseStream(noise or _short(), [8], key=key, **options)


def test_stepping_past_the_plan_is_an_error(seeded: Seeded) -> None:
    stream = _stream(seeded(1))
    for step in range(3):
        assert stream.step == step
        stream.add_(_zeros())
    gradient = _zeros()
    with pytest.raises(QuellError, match="ends after 3 steps"):
        stream.add_(gradient)
    assert not gradient.any()
    assert stream.step == 3


def test_a_step_cannot_be_asked_for_twice_or_out_of_order(seeded: Seeded) -> None:
    stream = _stream(seeded(1))
    stream.add_(_zeros(), step=0)
    with pytest.raises(QuellError, match="step 0 was added already; the next is 1"):
        stream.add_(_zeros(), step=0)
    with pytest.raises(QuellError, match="step 2 was asked for, but step 1 is due"):
        stream.add_(_zeros(), step=2)
    stream.add_(_zeros(), step=1)


def test_going_back_needs_a_declared_replay(seeded: Seeded) -> None:
    stream = _stream(seeded(1))
    saved = stream.state_dict()
    first = _zeros()
    stream.add_(first)
    with pytest.raises(QuellError, match="released steps up to 0, and step 0 would come again") as caught:
        stream.load_state_dict(saved)
    assert "replay=True" in str(caught.value)
    assert stream.step == 1
    stream.load_state_dict(saved, replay=True)
    again = _zeros()
    stream.add_(again)
    np.testing.assert_array_equal(first, again)


def test_a_step_that_failed_half_way_counts_as_released(seeded: Seeded, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _stream(seeded(1))
    stream.add_(_zeros())
    saved = stream.state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(stream._engine, "add", lambda tensors: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            stream.add_(_zeros())
    for after in (lambda: stream.add_(_zeros()), stream.state_dict):
        with pytest.raises(QuellError, match="failed half-way: load the last saved state"):
            after()
    with pytest.raises(QuellError, match="released steps up to 1, and step 1 would come again"):
        stream.load_state_dict(saved)
    stream.load_state_dict(saved, replay=True)
    stream.add_(_zeros())
    assert stream.step == 2


def test_twins_made_from_one_state_cannot_both_go_on() -> None:
    """Branching from a checkpoint: the second stream to release a step is refused, whichever it is."""
    key = Key.generate()
    first, second = _stream(key), _stream(key)
    first.add_(_zeros())
    second.load_state_dict(first.state_dict())
    second.add_(_zeros())
    with pytest.raises(QuellError, match="released steps up to 1, and step 1 would come again"):
        first.add_(_zeros())


def test_a_failed_restore_does_not_start_again_at_row_zero(seeded: Seeded, monkeypatch: pytest.MonkeyPatch) -> None:
    from quell.noise.cpu import CpuEngine

    straight, stream = _stream(seeded(1)), _stream(seeded(1))
    for _ in range(2):
        straight.add_(_zeros())
    stream.load_state_dict(straight.state_dict())
    with monkeypatch.context() as patch:
        patch.setattr(CpuEngine, "restore", lambda *_: 1 / 0)  # out of memory, say
        with pytest.raises(ZeroDivisionError):
            stream.add_(_zeros())
    due, again = _zeros(), _zeros()
    straight.add_(due)
    stream.add_(again)
    np.testing.assert_array_equal(due, again)


def test_a_fork_cannot_go_on_with_the_parents_stream(seeded: Seeded, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _stream(seeded(1))
    stream.add_(_zeros())
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(QuellError, match="does not survive a fork"):
        stream.add_(_zeros())


def test_two_threads_cannot_share_a_row(seeded: Seeded) -> None:
    stream = _stream(seeded(1))
    with stream._turn, pytest.raises(QuellError, match="two threads"):
        stream.add_(_zeros())


def test_going_back_to_the_start_empties_the_buffers(seeded: Seeded) -> None:
    stream = _stream(seeded(1), spec("bsr"))
    saved = stream.state_dict()
    first = [_zeros() for _ in range(4)]
    for gradient in first:
        stream.add_(gradient)
    stream.load_state_dict(saved, replay=True)
    for gradient in first:
        again = _zeros()
        stream.add_(again)
        np.testing.assert_array_equal(gradient, again)


def test_a_real_key_serves_one_run_in_a_process() -> None:
    key = Key.generate()
    _stream(key).add_(_zeros())
    second = _stream(Key(key.reveal()))
    with pytest.raises(QuellError, match="start a new key"):
        second.add_(_zeros())
    _stream(key, replay=True).add_(_zeros())
    _stream(Key.generate()).add_(_zeros())
    other_elements = NoiseStream(_short(), shards=[Shard(0, 8, 8), Shard(1, 0, 4)], key=key)
    other_elements.add_([_zeros(), _zeros(4)])


@pytest.mark.parametrize("other", ["chacha8", "philox"])
def test_another_generator_never_continues_or_repeats_a_run(other: str, tmp_path: Path) -> None:
    """Two releases of the same gradients under different noise would average it away, with or without a ledger."""
    key, recorded, path = Key.generate(), Key.generate(), tmp_path / "noise.ledger"
    _stream(key).add_(_zeros())
    gradient = _zeros()
    with pytest.raises(QuellError, match=r"load the checkpoint first.*with other gradients or other noise"):
        _stream(key, generator=other, replay=True).add_(gradient)
    assert not gradient.any()
    with Ledger(path) as ledger:
        _stream(recorded, ledger=ledger).add_(_zeros())
    with pytest.raises(QuellError, match="under another key, plan, max_grad_norm"):
        _stream(recorded, generator=other, ledger=path, replay=True)


def test_a_state_of_other_noise_is_refused(seeded: Seeded) -> None:
    stream = _stream(seeded(1))
    stream.add_(_zeros())
    saved = stream.state_dict()
    others = [_short(4), _short(3, scale=1.1), NoiseSpec(Regenerate(np.array([1.0, -0.51])), 3, 1.0)]
    for other in others:
        with pytest.raises(QuellError, match="belongs to other noise"):
            _stream(seeded(1), other).load_state_dict(saved)
    for generator in ("philox", "chacha8"):
        with pytest.raises(QuellError, match=f"generator='chacha20', this stream has '{generator}'"):
            _stream(seeded(1), generator=generator).load_state_dict(saved)
    with pytest.raises(QuellError, match="belongs to key"):
        _stream(seeded(2)).load_state_dict(saved)
    with pytest.raises(QuellError, match="other shards"):
        NoiseStream(_short(), [9], key=seeded(1)).load_state_dict(saved)
    with pytest.raises(QuellError, match="not the state of a noise stream"):
        _stream(seeded(1)).load_state_dict({"step": 1})
    with pytest.raises(QuellError, match="outside the plan's 3 steps"):
        _stream(seeded(1)).load_state_dict({**saved, "step": 4})
    ringed = _stream(seeded(1), spec("bsr"))
    ringed.add_(_zeros())
    with pytest.raises(QuellError, match="lacks the 3 buffers"):
        _stream(seeded(1), spec("bsr")).load_state_dict({**ringed.state_dict(), "buffers": None})


def test_fingerprints_forgive_what_changes_no_bit_of_the_noise_and_nothing_else() -> None:
    base = NoiseSpec(Ring(np.array([1.0, 0.5, 0.375])), 10, 1.0)
    assert base.fingerprint == NoiseSpec(Ring(np.array([1.0, 0.5 + 1e-15, 0.375])), 10, 1.0).fingerprint
    others = [
        NoiseSpec(Ring(np.array([1.0, 0.5, 0.376])), 10, 1.0),
        NoiseSpec(Ring(np.array([1.0, 0.5, 0.375]), np.linspace(1, 2, 10)), 10, 1.0),
        NoiseSpec(Regenerate(np.array([1.0, 0.5, 0.375])), 10, 1.0),
        NoiseSpec(Exponentials(np.array([0.5]), np.array([0.5])), 10, 1.0),
        NoiseSpec(Fenwick(10), 10, 1.0),
        NoiseSpec(Ring(np.array([1.0, 0.5, np.nextafter(np.float32(0.375), 1)])), 10, 1.0),
        NoiseSpec(base.recurrence, 10, 1.0 + 1e-15),
        NoiseSpec(base.recurrence, 10, 1.0, "another promise"),
    ]
    assert len({base.fingerprint, *(other.fingerprint for other in others)}) == 9


def test_tensors_that_cannot_take_noise_are_refused(seeded: Seeded) -> None:
    stream = NoiseStream(_short(), [8, 4], key=seeded(1))
    read_only = _zeros()
    read_only.flags.writeable = False
    cases = [
        ([_zeros()], "1 tensors were given, but the stream was made for 2"),
        ([_zeros(), None], "tensor 1 is None"),
        ([_zeros(), [0.0] * 4], "tensor 1 is list"),
        ([_zeros(), _zeros(5)], "tensor 1 has 5 elements, but the stream was made for 4"),
        ([_zeros(), np.zeros(4, np.int64)], "tensor 1 has dtype int64"),
        ([read_only, _zeros(4)], "tensor 0 is read-only"),
    ]
    for tensors, message in cases:
        with pytest.raises(QuellError, match=message):
            stream.add_(tensors)
    assert stream.step == 0


def test_torch_tensors_that_cannot_take_noise_are_refused(seeded: Seeded) -> None:
    torch = pytest.importorskip("torch")
    stream = NoiseStream(_short(), [4], key=seeded(1))
    for tensor, message in [
        (torch.zeros(4, dtype=torch.complex64), "dtype torch.complex64"),
        (torch.zeros(4).to_sparse(), "layout torch.sparse_coo"),
        (torch.zeros(4, device="meta"), "not on meta"),
    ]:
        with pytest.raises(QuellError, match=message):
            stream.add_(tensor)
    stream.add_(torch.zeros(4))
    with pytest.raises(QuellError, match="works on cpu, these tensors are NumPy"):
        stream.add_(_zeros(4))
    both = NoiseStream(_short(), [4, 4], key=seeded(1))
    with pytest.raises(QuellError, match="different devices"):
        both.add_([torch.zeros(4), _zeros(4)])


def test_memory_that_two_gradients_share_is_refused(seeded: Seeded) -> None:
    torch = pytest.importorskip("torch")
    for whole in (np.zeros((6, 4), np.float32), torch.zeros(6, 4)):
        shared = [
            ([whole, whole], "tensors 0 and 1 share memory"),
            ([whole[:4], whole[3:]], "tensors 0 and 1 share memory"),
            ([whole[:, ::2], whole[:, 2]], "tensors 0 and 1 share memory"),
            ([whole.T, whole[1]], "tensors 0 and 1 share memory"),
        ]
        for tensors, message in shared:
            stream = NoiseStream(_short(), tensors, key=seeded(1))
            with pytest.raises(QuellError, match=message):
                stream.add_(tensors)
            assert stream.step == 0
        apart = [whole[:2], whole[2:4], whole[4:, ::2], whole[4:, 1::2]]
        NoiseStream(_short(), apart, key=seeded(1)).add_(apart)
        assert bool((whole != 0).all())
    repeated = torch.zeros(4, 1).expand(4, 3)
    with pytest.raises(QuellError, match="tensor 0 repeats elements in memory"):
        NoiseStream(_short(), [12], key=seeded(1)).add_(repeated)


def test_bad_arguments_are_refused(seeded: Seeded) -> None:
    key = seeded(1)
    with pytest.raises(QuellError, match="generator='mt19937' is not known"):
        _stream(key, generator="mt19937")
    with pytest.raises(QuellError, match="tensors or for shards"):
        NoiseStream(_short(), key=key)
    with pytest.raises(QuellError, match="carries its scale already"):
        _stream(key, max_grad_norm=1.0)
    with pytest.raises(QuellError, match="threads=0"):
        _stream(key, threads=0)
    with pytest.raises(QuellError, match="two shards both hold element 4 of tensor 2"):
        NoiseStream(_short(), shards=[Shard(2, 0, 8), Shard(2, 4, 8)], key=key)
    with pytest.raises(QuellError, match=r"scale=0 must be positive"):
        _short(scale=0.0)
    with pytest.raises(QuellError, match="made for 7 steps"):
        NoiseSpec(Fenwick(7), 8, 1.0)
    with pytest.raises(QuellError, match="buffered='yes' must be True, False or 'auto'"):
        _stream(key, buffered="yes")
    for memory in (-1, float("nan"), "4"):
        with pytest.raises(QuellError, match="number of model copies"):
            _stream(key, memory=memory)
    with pytest.raises(QuellError, match="float32 would round away"):
        NoiseSpec(Regenerate(np.array([1.0, 1e300])), 8, 1.0).recipe()
    with pytest.raises(QuellError, match="not from str"):
        NoiseSpec.of("plan.json", 1.0)
    for bad in ((-1, 0, 1), (0, 0.5, 1), (2**32, 0, 1), (0, MOST_ELEMENTS, 1)):
        with pytest.raises(QuellError):
            Shard(*bad)


@pytest.mark.parametrize("scale", [1e-46, 1e-39, 1.9e-31, 2e30, 1e39])
def test_a_scale_that_float32_would_spoil_is_refused(scale: float, seeded: Seeded) -> None:
    """1e-46 rounds to no noise at all, 1e-39 to noise of a few bits, 1e39 to infinity."""
    with pytest.raises(QuellError, match=r"scale"):
        _stream(seeded(1), _short(scale=scale))
    with pytest.raises(QuellError, match=r"scale"):
        _stream(seeded(1), NoiseSpec(Regenerate(np.ones(1), np.array([1.0, scale, 1.0])), 3, 1.0))


@pytest.mark.parametrize("row_scale", [[1.0, 0.0, 1.0], [1.0, -1.0, 1.0], [1.0, np.nan, 1.0], [1.0, np.inf, 1.0]])
def test_a_row_without_noise_is_refused(row_scale: list[float]) -> None:
    scales = np.array(row_scale)
    for recurrence in (
        Regenerate(np.ones(1), scales),
        Ring(np.ones(2), scales),
        Ring(np.ones((3, 2)), scales),
        Exponentials(np.array([0.5]), np.array([0.5]), scales),
    ):
        with pytest.raises(QuellError, match="row_scale must hold one positive, finite number per step"):
            NoiseSpec(recurrence, 3, 1.0)


def test_tables_that_do_not_fit_are_refused() -> None:
    for recurrence in (
        Regenerate(np.ones(1), np.ones(4)),
        Ring(np.ones(2), np.ones(4)),
        Ring(np.ones((3, 2)), np.ones(4)),
        Ring(np.ones((4, 2)), np.ones(3)),
        Exponentials(np.array([0.5]), np.array([0.5]), np.ones(4)),
    ):
        with pytest.raises(QuellError, match="made for 4 steps"):
            NoiseSpec(recurrence, 3, 1.0)
    for noising in (np.zeros(0), np.zeros(2), np.array([0.0, 1.0]), np.array([1.0, np.nan]), np.ones((3, 2))):
        with pytest.raises(QuellError, match="noising must be one row"):
            NoiseSpec(Regenerate(noising), 3, 1.0)
    for bands in (
        np.zeros(0),
        np.array([0.0, 1.0]),
        np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]),
        np.full(2, np.inf),
    ):
        with pytest.raises(QuellError, match="no 0 on the diagonal"):
            NoiseSpec(Ring(bands), 3, 1.0)
    with pytest.raises(QuellError, match="as many"):
        NoiseSpec(Exponentials(np.ones(2), np.ones(1)), 3, 1.0)


@pytest.mark.slow
def test_a_plan_makes_its_noise(seeded: Seeded) -> None:
    plan = quell.plan(examples=1000, batch_size=100, epochs=3, epsilon=8, delta=1e-5)
    stream = NoiseStream(plan, [8], key=seeded(1), max_grad_norm=0.3)
    assert stream.steps == plan.steps == 30
    assert stream.spec.scale == pytest.approx(0.3 * plan.mechanism.noise_multiplier)
    assert stream.buffers == plan.mechanism.buffers
    for wrong in (None, 0.0, float("nan")):
        with pytest.raises(QuellError, match="max_grad_norm"):
            NoiseStream(plan, [8], key=seeded(1), max_grad_norm=wrong)


def test_torch_states_load_without_trusting_the_file(seeded: Seeded, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    stream = _stream(seeded(1), spec("bsr"))
    stream.add_(torch.zeros(8))
    torch.save(stream.state_dict(), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    expected, made = torch.zeros(8), _zeros()
    stream.add_(expected)
    resumed = _stream(seeded(1), spec("bsr"))
    resumed.load_state_dict(saved)
    resumed.add_(made)  # the run may move from torch to NumPy, or to a GPU
    np.testing.assert_array_equal(made, expected.numpy())


def test_torch_compile_calls_the_stream_and_does_not_trace_it(seeded: Seeded) -> None:
    torch = pytest.importorskip("torch")
    stream, plain = _stream(seeded(1)), _stream(seeded(1))

    def step(gradient):
        doubled = gradient * 2
        stream.add_(doubled)
        return doubled

    compiled = torch.compile(step, backend="eager")
    for _ in range(3):
        expected = torch.full((8,), 2.0)
        plain.add_(expected)
        assert torch.equal(compiled(torch.ones(8)), expected)
    assert stream.step == 3


def test_the_stream_keeps_its_ledger(tmp_path: Path) -> None:
    key, path = Key.generate(), tmp_path / "noise.ledger"
    stream = _stream(key, _short(50), ledger=path)
    for _ in range(5):
        stream.add_(_zeros())
    saved = stream.state_dict()
    stream.add_(_zeros())
    assert stream.ledger is not None
    stream.ledger.close()
    with Ledger(path) as ledger:
        assert ledger.released == 6
        behind = _stream(key, _short(50), ledger=ledger)
        with pytest.raises(QuellError, match="released steps up to 5, and step 5 would come again"):
            behind.load_state_dict(saved)
        with pytest.raises(QuellError, match="step 0 would come again"):
            behind.add_(_zeros())
        behind.load_state_dict(saved, replay=True)
        behind.add_(_zeros())
        behind.add_(_zeros())
        assert behind.step == 7
    with Ledger(path) as ledger:
        assert ledger.released == 7


def test_a_lost_ledger_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    key, path = Key.generate(), tmp_path / "noise.ledger"
    stream = _stream(key, _short(50), ledger=path)
    for _ in range(5):
        stream.add_(_zeros())
    saved = stream.state_dict()
    for _ in range(3):
        stream.add_(_zeros())
    assert stream.ledger is not None
    stream.ledger.close()
    claims._claims.clear()  # as in a new process
    path.unlink()
    with Ledger(path) as empty:
        resumed = _stream(key, _short(50), ledger=empty)
        for load in (
            lambda: resumed.load_state_dict(saved),
            lambda: resumed.load_state_dict(saved, replay=True),
            lambda: resumed.reshard([Shard(0, 0, 4)], [saved]),
        ):
            with pytest.raises(QuellError, match="has 0 steps of this key, but 5 were released when the state was"):
                load()
        assert resumed.step == 0
    with Ledger(path) as ledger:  # as the message says, for a run that never had one
        ledger.record(5)
    _stream(key, _short(50), ledger=path).load_state_dict(saved)


def test_a_loaded_key_wants_a_ledger(tmp_path: Path, seeded: Seeded) -> None:
    key = Key.generate()
    key.save(tmp_path / "run.key")
    with pytest.warns(UnrecordedKeyWarning, match="no ledger says which steps it has released"):
        _stream(Key.load(tmp_path / "run.key"))
    _stream(Key.load(tmp_path / "run.key"), ledger=tmp_path / "ledger")
    _stream(Key(key.reveal()))  # a rank among others; the one that loaded the key keeps the ledger
    seeded(1).save(tmp_path / "demo.key")
    _stream(Key.load(tmp_path / "demo.key"))


def test_a_damaged_state_is_refused(seeded: Seeded) -> None:
    stream = _stream(seeded(1), spec("bsr"))
    stream.add_(_zeros())
    saved = stream.state_dict()
    for damage, message in [
        ({"step": 0.5}, "must be a whole number"),
        ({"step": -1}, "must be a whole number"),
        ({"buffers": [saved["buffers"][0][:1]]}, "damaged"),
        ({"buffers": []}, "damaged"),
    ]:
        with pytest.raises(QuellError, match=message):
            _stream(seeded(1), spec("bsr")).load_state_dict({**saved, **damage})
    with pytest.raises(QuellError, match="not the state of a noise stream"):
        _stream(seeded(1), spec("bsr")).load_state_dict({k: v for k, v in saved.items() if k != "buffers"})
