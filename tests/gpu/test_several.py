"""Gathers to several destinations: every one holds what a gather to one leaves, and the bytes around are nobody's."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gpu.plain import Plain  # noqa: E402  (needs torch)

pytestmark = pytest.mark.gpu

ITEMS = [9, 3, 60, 1, 33, 34, 35, 0]
GUARD = 256


def destinations(plain, n, nbytes, device="cuda:0"):
    """`n` pieces of staging, each between guards."""
    whole = torch.full((n, nbytes + 2 * GUARD), 0xA5, dtype=torch.uint8, device=device)
    return whole, [row.data_ptr() + GUARD for row in whole]


def check(plain, whole, nbytes, items=ITEMS):
    torch.cuda.synchronize()
    expected = plain.expected(items).to(whole.device)
    assert all(torch.equal(row[GUARD : GUARD + nbytes], expected) for row in whole)
    assert bool((whole[:, :GUARD] == 0xA5).all())
    assert bool((whole[:, GUARD + nbytes :] == 0xA5).all())


@pytest.mark.parametrize("max_sms", [None, 2])
@pytest.mark.parametrize("width", [128, 4096])
@pytest.mark.parametrize("n", [2, 9])
@pytest.mark.parametrize("on_device", [True, False], ids=["list-on-device", "list-on-host"])
def test_every_destination_has_the_bytes_of_one(variant, n, width, on_device, max_sms):
    plain = Plain(variant, n_views=5, width=width)
    nbytes = plain.plan.nbytes(plain.tokens(len(ITEMS)))
    whole, (first, *also) = destinations(plain, n, nbytes)
    plain.plan.gather(
        first, nbytes, plain.list(ITEMS, on_device=on_device), plain.tokens(len(ITEMS)), also=also, max_sms=max_sms
    )
    check(plain, whole, nbytes)


def test_many_tiles_to_many_destinations(variant):
    plain = Plain(variant, n_views=16, n_items=4096, width=512)
    items = torch.randperm(4096)[:3000].tolist()
    nbytes = plain.plan.nbytes(plain.tokens(len(items)))
    whole, (first, *also) = destinations(plain, 5, nbytes)
    plain.plan.gather(first, nbytes, plain.list(items, on_device=True), plain.tokens(len(items)), also=also)
    check(plain, whole, nbytes, items)


@pytest.mark.parametrize("n", [2, 9])
def test_the_checksum_is_added_once(variant, n):
    plain = Plain(variant, checksum=True)
    nbytes = plain.plan.nbytes(plain.tokens(len(ITEMS)))
    whole, (first, *also) = destinations(plain, n, nbytes)
    sums = torch.zeros(2, dtype=torch.int64, device="cuda:0")
    at = nbytes, plain.list(ITEMS, on_device=True), plain.tokens(len(ITEMS))
    plain.plan.gather(first, *at, sum_ptr=sums.data_ptr())
    whole.fill_(0xA5)
    plain.plan.gather(first, *at, also=also, sum_ptr=sums.data_ptr() + 8)
    check(plain, whole, nbytes)
    assert sums[0] == sums[1] != 0


def test_destinations_may_lie_on_the_device_and_in_page_locked_host_memory(variant):
    plain = Plain(variant)
    nbytes = plain.plan.nbytes(plain.tokens(len(ITEMS)))
    here, (first,) = destinations(plain, 1, nbytes)
    host = torch.full((1, nbytes + 2 * GUARD), 0xA5, dtype=torch.uint8).pin_memory()
    plain.plan.gather(
        first, nbytes, plain.list(ITEMS, on_device=False), plain.tokens(len(ITEMS)), also=[host.data_ptr() + GUARD]
    )
    check(plain, here, nbytes)
    check(plain, host, nbytes)


def test_items_outside_the_pool_are_left_out_everywhere(variant):
    plain = Plain(variant, width=2048)
    items = [9, 64, 60]
    nbytes = plain.plan.nbytes(plain.tokens(len(items)))
    whole, (first, *also) = destinations(plain, 3, nbytes)
    plain.plan.gather(first, nbytes, plain.list(items, on_device=True), plain.tokens(len(items)), also=also)
    torch.cuda.synchronize()
    for row in whole:
        found = row[GUARD : GUARD + nbytes].view(plain.cells.shape[0], len(items), plain.width)
        assert torch.equal(found[:, [0, 2]], plain.cells[:, [9, 60]])
        assert bool((found[:, 1] == 0xA5).all())
