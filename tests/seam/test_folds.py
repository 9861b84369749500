"""Folds: what they make by hand, that parts join to the whole wherever it is cut, and which ends they are shown."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from byhand import ENGINES, HALF, LEAF, federation, model, number
from fedrelay.seam.federation import Run
from fedrelay.seam.folds import Bank, Ends, Mean, Moved, Slice, Sum, stack, total
from fedrelay.seam.plan import chain
from fedrelay.seam.values import leaves


def w(a: list[float], b: float) -> dict[str, torch.Tensor]:
    return {"a": torch.tensor(a, dtype=torch.float64), "b": torch.tensor(b, dtype=torch.float64)}


def ends(n: int, scopes=None) -> Ends:
    """Three chains by hand, of which the first n are shown."""
    starts = [w([0, 0], 1), w([0, 0], 1), w([1, 1], 0)][:n]
    finish = [w([1, 2], 3), w([3, 4], 5), w([8, 0], -4)][:n]
    ups = [{"c": {"a": t["a"] * 10}, "d": {"b": t["b"]}} for t in finish]
    return Ends(starts, finish, scopes or [("a", "b")] * n, [1, 3, 4][:n], ups)


def plain(tree):
    return {n: t.tolist() for n, t in tree.items()}


@pytest.mark.parametrize(
    ("fold", "expected"),
    [
        (Mean(), {"a": [42 / 8, 14 / 8], "b": 2 / 8}),
        (Mean("count"), {"a": [4, 2], "b": 4 / 3}),
        (Sum("c"), {"a": [120, 60]}),
        (Sum("d"), {"b": 4}),
        (Moved(), {"a": [11, 5], "b": 2}),
    ],
    ids=repr,
)
def test_sums_and_means_by_hand(fold, expected):
    """Ends (1 2 | 3), (3 4 | 5), (8 0 | -4) of 1, 3, 4 examples, from (0 0 | 1) twice and (1 1 | 0).

    By examples: a = (1 + 9 + 32, 2 + 12 + 0)/8 and b = (3 + 15 - 16)/8; by count: (12, 6 | 4)/3. Moved: (1 2 | 2) + (3 4 | 4)
    + (7 -1 | -4). Sent up: 10 a under "c", b under "d".
    """
    assert plain(fold.result(fold.add(fold.empty(), ends(3)))) == expected


def test_only_the_leaves_in_scope_are_merged():
    shown = ends(2, [("b",), ("b",)])
    for fold, b in ((Mean(), 4.5), (Mean("count"), 4.0), (Moved(), 6.0)):
        assert plain(fold.result(fold.add(fold.empty(), shown))) == {"b": b}


def test_a_bank_keeps_ends_in_order_with_their_examples():
    shown = ends(3)
    assert [(plain(end), n) for end, n in Bank().result(Bank().add((), shown))] == [
        ({"a": [1, 2], "b": 3}, 1),
        ({"a": [3, 4], "b": 5}, 3),
        ({"a": [8, 0], "b": -4}, 4),
    ]
    assert [(t.tolist(), n) for t, n in Bank("a").result(Bank("a").add((), shown))] == [([1, 2], 1), ([3, 4], 3), ([8, 0], 4)]


def test_a_bank_may_lay_its_models_elsewhere():
    """Views are handed to the spill as they are; a model that has tensors of its own needs no copy anywhere."""
    view, own = Slice({}, {"a": torch.tensor([[1.0], [2.0]])}, 1), {"a": torch.tensor([3.0])}
    laid = []

    def spill(model):
        laid.append(model)
        return "on disk"

    shown = Ends([own] * 2, [view, own], [("a",)] * 2, [1, 1], [{}, {}], spill)
    (first, n), (second, m) = Bank().result(Bank().add((), shown))
    assert (first, n, m) == ("on disk", 1, 1)
    assert second is own
    assert [model is view for model in laid] == [True]


def test_a_bank_outlives_the_buffers_that_it_was_filled_from():
    """Ends are often views into lanes that train on: what is banked must not change with them."""
    whole = torch.tensor([[1.0], [2.0]])
    views = [Slice({"b": torch.tensor(0.0)}, {"a": whole}, i) for i in range(2)]
    shown = Ends(views, views, [("a",)] * 2, [1, 1], [{}, {}])
    banks = [bank.add(bank.empty(), shown) for bank in (Bank(), Bank("a"))]
    whole.fill_(99)
    assert [end["a"].item() for end, _ in banks[0]] == [1, 2]
    assert [t.item() for t, _ in banks[1]] == [1, 2]


NOTHING = [(Mean(), {}), (Mean("count"), {}), (Sum("c"), {}), (Moved(), {}), (Bank(), ()), (Bank("a"), ())]


@pytest.mark.parametrize(("fold", "nothing"), NOTHING, ids=lambda v: repr(v))
def test_where_everybody_failed_nothing_is_made(fold, nothing):
    assert fold.result(fold.empty()) == nothing
    assert fold.result(fold.merge(fold.empty(), fold.empty())) == nothing


def test_a_mean_over_no_examples_at_all_is_empty_rather_than_nan():
    shown = replace(ends(2), examples=[0, 0])
    assert Mean().result(Mean().add(Mean().empty(), shown)) == {}
    joined = Mean().merge(Mean().add(Mean().empty(), shown), Mean().add(Mean().empty(), ends(2)))
    assert plain(Mean().result(joined)) == {"a": [2.5, 3.5], "b": 4.5}


FINITE = st.floats(-1e3, 1e3).map(lambda v: round(v, 3))
CHAIN = st.tuples(st.lists(FINITE, min_size=6, max_size=6), st.integers(0, 50))
FOLDS = [fold for fold, _ in NOTHING]


def shown(chains, views: bool) -> Ends:
    """These chains as a block: as tensors of their own, or as views into what lies stacked."""
    made = [(w(v[:2], v[2]), w(v[3:5], v[5])) for v, _ in chains]
    starts, finish = ([pair[i] for pair in made] for i in (0, 1))
    if views:
        stacked = {n: torch.stack([e[n] for e in finish]) for n in ("a", "b")}
        finish = [Slice(s, stacked, i) for i, s in enumerate(starts)]
    ups = [{"c": {"a": s["a"] - e["b"]}} for s, e in zip(starts, finish, strict=True)]
    return Ends(starts, finish, [("a", "b")] * len(made), [n for _, n in chains], ups)


def flat(made) -> np.ndarray:
    """Everything a fold made as one row of numbers."""
    if isinstance(made, tuple):
        rows = [np.append(flat(end) if not torch.is_tensor(end) else flat({"t": end}), n) for end, n in made]
        return np.concatenate(rows) if rows else np.zeros(0)
    return np.concatenate([np.zeros(0), *(t.reshape(-1).numpy() for t in leaves(made))])


@pytest.mark.parametrize("fold", FOLDS, ids=repr)
@settings(deadline=None)
@given(chains=st.lists(CHAIN, min_size=1, max_size=8), data=st.data(), views=st.booleans())
def test_parts_join_to_the_whole_wherever_it_is_cut(fold, chains, data, views):
    """A monoid: blocks of consecutive chains, empty ones too, merged from either side, make what one block makes."""
    i, j = sorted((data.draw(st.integers(0, len(chains))), data.draw(st.integers(0, len(chains)))))
    a, b, c = (
        fold.add(fold.empty(), shown(part, views)) if part else fold.empty() for part in (chains[:i], chains[i:j], chains[j:])
    )
    whole = flat(fold.result(fold.add(fold.empty(), shown(chains, views))))
    for joined in (fold.merge(fold.merge(a, b), c), fold.merge(a, fold.merge(b, c))):
        np.testing.assert_allclose(flat(fold.result(joined)), whole, rtol=1e-12, atol=1e-9)
    in_a_row = fold.empty()
    for part in (chains[:i], chains[i:]):
        in_a_row = fold.add(in_a_row, shown(part, views)) if part else in_a_row
    np.testing.assert_allclose(flat(fold.result(in_a_row)), whole, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("fold", FOLDS, ids=repr)
@settings(deadline=None)
@given(chains=st.lists(CHAIN, min_size=1, max_size=5))
def test_views_and_tensors_of_their_own_make_the_same(fold, chains):
    made = [flat(fold.result(fold.add(fold.empty(), shown(chains, views)))) for views in (False, True)]
    np.testing.assert_array_equal(*made)


@pytest.mark.parametrize("fold", FOLDS, ids=repr)
def test_adding_changes_no_accumulator(fold):
    """Accumulators lie in checkpoints and are joined more than once."""
    before = fold.add(fold.empty(), ends(2))
    kept = flat(fold.result(before)).copy()
    fold.add(before, ends(3))
    fold.merge(before, fold.add(fold.empty(), ends(3)))
    np.testing.assert_array_equal(flat(fold.result(before)), kept)


@pytest.mark.parametrize("fold", [Mean(), Mean("count"), Moved()], ids=repr)
def test_chains_of_different_scope_in_one_block_are_refused(fold):
    with pytest.raises(ValueError, match=r"^chains of different scope meet in one fold: give each scope a plan of its own$"):
        fold.add(fold.empty(), ends(2, [("a", "b"), ("b",)]))


def test_blocks_of_different_scope_are_refused():
    parts = [Mean().add(Mean().empty(), ends(2, [s] * 2)) for s in (("a", "b"), ("b",))]
    with pytest.raises(ValueError, match=r"^chains of different scope meet in one fold"):
        Mean().merge(*parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_a_weighted_total_keeps_shape_and_type(shape, dtype):
    """1 t - 2 t + 0.5 t = -0.5 t"""
    t = torch.arange(1.0, 7.0).to(dtype)[: int(np.prod(shape))].reshape(shape)
    made = total(t.expand(3, *shape), [1, -2, 0.5])
    assert (made.dtype, made.shape) == (dtype, shape)
    assert torch.equal(made, -0.5 * t)
    assert torch.equal(total(torch.stack([t, t])), 2 * t)


# --- models that lie stacked


def test_a_slice_is_a_model():
    base, stacked = w([7, 8], 9), {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "c": torch.tensor([5.0, 6.0])}
    s = Slice(base, stacked, 1)
    assert plain(s) == {"a": [3, 4], "b": 9, "c": 6}
    assert (len(s), list(s), "c" in s, "d" in s) == (3, ["a", "b", "c"], True, False)
    assert s["b"] is base["b"]
    assert s["a"].data_ptr() == stacked["a"][1].data_ptr()
    with pytest.raises(KeyError):
        s["d"]


def test_a_settled_slice_is_free_of_its_neighbours():
    base, stacked = {"b": torch.tensor(9.0)}, {"a": torch.tensor([[1.0], [3.0]])}
    settled = Slice(base, stacked, 1).settled()
    stacked["a"].fill_(99)
    assert plain(settled) == {"b": 9, "a": [3]}
    assert settled["b"] is base["b"]


@pytest.mark.parametrize(
    ("rows", "viewed"), [([0, 1, 2], True), ([1, 2], True), ([2], True), ([2, 1], False), ([0, 2], False), ([1, 1], False)]
)
def test_stacking_neighbours_copies_nothing(rows, viewed):
    whole = torch.arange(6.0).reshape(3, 2)
    made = stack([Slice({}, {"a": whole}, i) for i in rows], "a")
    assert made.tolist() == whole[rows].tolist()
    assert (made.data_ptr() == whole[rows[0]].data_ptr()) is viewed


def test_a_leaf_that_all_share_is_not_multiplied():
    t = torch.ones(2, 3)
    for models in ([{"a": t}] * 4, [Slice({"a": t}, {"b": torch.zeros(4)}, i) for i in range(4)]):
        made = stack(models, "a")
        assert made.shape == (4, 2, 3)
        assert made.stride(0) == 0
        assert made.data_ptr() == t.data_ptr()


def test_models_of_different_origin_are_stacked_one_by_one():
    one, two = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
    models = [Slice({}, {"a": one}, 1), Slice({}, {"a": two}, 0), {"a": torch.tensor([5.0])}, Slice({"a": one[0]}, {}, 0)]
    assert stack(models, "a").tolist() == [[2], [3], [5], [1]]


# --- what a plan shows them


@pytest.mark.parametrize("pick", ENGINES, ids=lambda p: p.engine)
def test_ends_hand_overs_and_the_examples_that_weigh_them(pick):
    """Half-way steps from 0: targets 2 then 6 (1 and 3 examples) hand over 1 and 3.5; target 10 (2 examples) hands over 5.

    At ends, with 4 examples seen before by the first chain: (8 * 3.5 + 2 * 5)/10 = 3.8, by count 4.25. At every hand-over:
    (1 * 1 + 3 * 3.5 + 2 * 5)/6 = 21.5/6, by count 9.5/3; examples seen before do not count there.
    """
    fed = federation([2, 6, 10], sizes=[1, 3, 2], pick=pick)
    folds = [Mean(), Mean("count"), Mean(at="visits"), Mean("count", at="visits"), Moved(), Moved(at="visits"), Bank()]
    got = Run(fed).train([chain(model(0), [0, 1], HALF, seen=4), chain(model(0), [2], HALF)], *folds)
    expected = [3.8, 4.25, 21.5 / 6, 9.5 / 3, 8.5, 8.5]
    assert [number(got[f]) for f in folds[:-1]] == pytest.approx(expected, abs=1e-12)
    assert [(number(end), n) for end, n in got[Bank()]] == [(3.5, 8), (5.0, 2)]


@pytest.mark.parametrize("pick", ENGINES, ids=lambda p: p.engine)
def test_a_chain_in_which_everybody_failed_is_shown_only_to_every_end(pick):
    """Chain 0 is lost, chain 1 survives its second visit only (3 to 4.5), chain 2 fails, chain 3 is well (0 to 5).

    A failed client counts nowhere: chain 1 weighs its second client's 4 examples, and 100 that it saw before.
    """
    fed = federation([2, float("nan"), 6, 10], sizes=[1, 2, 4, 8], pick=pick)
    starts = [model(v) for v in (7, 3, -1, 0)]
    chains = [
        chain(s, who, HALF, seen=seen) for s, who, seen in zip(starts, ([0], [1, 2], [1], [3]), (9, 100, 0, 0), strict=True)
    ]
    chains[0] = replace(chains[0], visits=(replace(chains[0].visits[0], lost="dropped out"),))
    at_ends, at_every_end = Bank(at="ends"), Bank()
    got = Run(fed).train(chains, at_ends, at_every_end, Mean(), Moved(), Mean("count", at="visits"))
    assert [(number(end), n) for end, n in got[at_ends]] == [(4.5, 104), (5, 8)]
    assert [(number(end), n) for end, n in got[at_every_end]] == [(7, 9), (4.5, 104), (-1, 0), (5, 8)]
    assert got[at_every_end][0][0][LEAF] is starts[0][LEAF]
    assert number(got[Mean()]) == pytest.approx((104 * 4.5 + 8 * 5) / 112, abs=1e-12)
    assert number(got[Moved()]) == pytest.approx(1.5 + 5, abs=1e-12)
    assert number(got[Mean("count", at="visits")]) == pytest.approx(4.75, abs=1e-12)
    assert got.receipts.reasons == {0: "dropped out", 1: "not finite", 3: "not finite"}


@pytest.mark.parametrize("pick", ENGINES, ids=lambda p: p.engine)
def test_a_client_without_examples_does_not_turn_the_mean_into_nan(pick):
    got = Run(federation([2, 6], sizes=[0, 1], pick=pick)).train([chain(model(3), [0], HALF)], Mean(), Mean("count"))
    assert got[Mean()] == {}
    assert number(got[Mean("count")]) == 3
