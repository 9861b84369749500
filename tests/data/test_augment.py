"""Transforms: equal to plain slicing row by row, and a function of the row's key only."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fedrelay.data import CropFlip, Normalise, Transforms  # noqa: E402

KEYS = torch.arange(64) * 7919 - 11


@pytest.fixture
def child() -> object:
    return pytest.importorskip("fedrelay.seam.places", reason="the engine's random numbers are not there").child


def test_normalise_by_hand() -> None:
    """(51 / 255 - 0.1) / 0.5 = 0.2; (255 / 255 - 0.5) / 0.25 = 2."""
    x = torch.tensor([51, 255], dtype=torch.uint8).reshape(1, 2, 1, 1)
    seen = Normalise((0.1, 0.5), (0.5, 0.25), 1 / 255)(x)
    assert seen.dtype == torch.float32
    assert seen.flatten().tolist() == pytest.approx([0.2, 2.0])


def test_normalise_with_one_number_for_all_channels() -> None:
    x = torch.rand(4, 3, 2, 2, dtype=torch.float64)
    assert torch.allclose(Normalise((0.1, 0.2, 0.3), (2.0,))(x), (x - torch.tensor([0.1, 0.2, 0.3]).double().view(3, 1, 1)) / 2)
    assert torch.allclose(Normalise((0.1,), ())(x), x - 0.1)
    assert Normalise((0.1,))(x).dtype == torch.float64


def test_normalise_tables() -> None:
    x = torch.tensor([[1.0, 10.0], [3.0, 30.0]])
    assert Normalise((2.0, 20.0), (1.0, 10.0))(x).tolist() == [[-1.0, -1.0], [1.0, 1.0]]


def test_normalise_leaves_tokens_alone() -> None:
    tokens = torch.tensor([[3, 1]])
    assert Normalise()(tokens) is tokens


def test_normalise_refuses_other_channels() -> None:
    with pytest.raises(ValueError, match=r"^Normalise has numbers for 3 channels, but x has 1$"):
        Normalise((0.1, 0.2, 0.3))(torch.rand(2, 1, 4, 4))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
@pytest.mark.parametrize(("pad", "shape"), [(4, (3, 32, 32)), (2, (1, 5, 8)), (0, (2, 3, 3)), (3, (1, 2, 2))])
def test_crop_flip_equals_padding_and_slicing(child, pad: int, shape: tuple[int, ...], dtype) -> None:  # type: ignore[no-untyped-def]
    x = (torch.arange(64 * int(np.prod(shape))) % 251 + 1).reshape(64, *shape).to(dtype)
    seen = CropFlip(pad)(x, KEYS)
    for row, key, image in zip(x.numpy(), KEYS, seen.numpy(), strict=True):
        down, right, mirrored = (int(child(key, i)) % 2**64 // 2**32 % 2**31 for i in range(3))
        window = np.pad(row, ((0, 0), (pad, pad), (pad, pad)))
        top, left = down % (2 * pad + 1), right % (2 * pad + 1)
        window = window[:, top : top + shape[1], left : left + shape[2]]
        assert np.array_equal(image, window[:, :, ::-1] if mirrored % 2 else window)


def test_crop_flip_depends_on_the_key_only(child: object) -> None:
    x = torch.rand(64, 3, 8, 8)
    whole, order = CropFlip(2)(x, KEYS), torch.randperm(64)
    assert torch.equal(CropFlip(2)(x[order], KEYS[order]), whole[order])
    assert torch.equal(CropFlip(2)(x[5:6], KEYS[5:6]), whole[5:6])
    lanes = torch.vmap(CropFlip(2))(x.reshape(4, 16, 3, 8, 8), KEYS.reshape(4, 16))
    assert torch.equal(lanes.reshape(x.shape), whole)
    assert not torch.equal(CropFlip(2)(x, KEYS + 1), whole)


def test_crop_flip_is_uniform(child: object) -> None:
    """One bright pixel in the middle of 9x9, pad 2: 25 places, each at 1 / 25, whether mirrored (half of them) or not.

    50,000 keys: a place is hit 2000 times, standard deviation (50,000 * 0.04 * 0.96) ** 0.5 = 44.
    """
    n = 50_000
    x = torch.zeros(1, 1, 9, 9)
    x[0, 0, 4, 4] = 1
    hits = CropFlip(2)(x.expand(n, -1, -1, -1), torch.arange(n)).sum((0, 1))
    assert hits.sum() == n
    assert (hits[2:7, 2:7] - n / 25).abs().max() < 5 * 44
    # The corner shows mirroring: without padding it is either where it was or at the other side.
    x = torch.zeros(1, 1, 2, 2)
    x[0, 0, 0, 0] = 1
    flips = CropFlip(0)(x.expand(n, -1, -1, -1), torch.arange(n))[:, 0, 0, 1].sum()
    assert abs(float(flips) - n / 2) < 5 * (n / 4) ** 0.5


def test_without_keys_nothing_is_drawn() -> None:
    x = torch.rand(2, 1, 4, 4)
    assert CropFlip()(x) is x


def test_a_negative_border() -> None:
    with pytest.raises(ValueError, match=r"^CropFlip: pad must be at least 0, not -1$"):
        CropFlip(-1)(torch.rand(2, 1, 4, 4))


def test_transforms_run_in_order_with_their_own_keys(child) -> None:  # type: ignore[no-untyped-def]
    x = torch.rand(64, 3, 8, 8)
    scaled = Normalise((0.5,), (2.0,))
    both = Transforms((CropFlip(2), scaled, CropFlip(1)))
    expected = CropFlip(1)(scaled(CropFlip(2)(x, child(KEYS, 0))), child(KEYS, 2))
    assert torch.equal(both(x, KEYS), expected)
    assert torch.equal(both(x), scaled(x))
