"""Section 7, law: the formula against its definition, the fit against rounds simulated from a planted law."""

import math
import time

import pytest
import torch

from glance import expected_accepted, fit_entropy_law, r2_on_deciles


def simulate(seed, rounds=400, b0=1.5, b1=0.8, entropy=None, cap=None):
    """Rounds as the law has them: offset after offset survives with probability p(H), up to the round's cap."""
    g = torch.Generator().manual_seed(seed)
    h = torch.rand(rounds, generator=g, dtype=torch.float64) * 3 if entropy is None else torch.full((rounds,), entropy, dtype=torch.float64)
    cap = torch.randint(1, 16, (rounds,), generator=g) if cap is None else torch.full((rounds,), cap)
    survived = torch.rand(rounds, 15, generator=g) < torch.sigmoid(b0 - b1 * h)[:, None]
    return h, survived.long().cumprod(dim=1).sum(dim=1).minimum(cap), cap


# ---- the formula ----


@pytest.mark.parametrize("cap", [0, 1, 4, 15])
@pytest.mark.parametrize("p", [1e-6, 0.3, 0.5, 0.999])
def test_expected_accepted_is_the_mean_of_a_capped_geometric(p, cap):
    """E[a] = sum a P(a): a < L drafts survive and the next fails, or all L do. The same as p (1 - p^L) / (1 - p)."""
    b0 = math.log(p / (1 - p))
    value = float(expected_accepted(torch.tensor([0.0]), b0, 0.7, cap))
    assert value == pytest.approx(sum(a * p**a * (1 - p) for a in range(cap)) + cap * p**cap, rel=1e-9)
    assert value == pytest.approx(p * (1 - p**cap) / (1 - p), rel=1e-9)


@pytest.mark.parametrize("cap", [1, 7, 15])
def test_at_p_one_everything_is_accepted(cap):
    """Where the closed form is 0 / 0 the value is its limit, L; at p = 0 it is 0."""
    assert expected_accepted(torch.tensor([0.0, 2.0]), 1e3, 0.0, cap).tolist() == [cap, cap]
    assert expected_accepted(torch.tensor([0.0]), -1e3, 0.0, cap).tolist() == [0]


def test_entropy_enters_through_the_logit():
    """logit p = b0 - b1 H, in nats: at H = b0 / b1 every offset is a coin toss; less is expected as H grows."""
    assert float(expected_accepted(torch.tensor([2.5]), 2.0, 0.8, 3)) == pytest.approx(1 / 2 + 1 / 4 + 1 / 8)
    assert (expected_accepted(torch.linspace(0, 5, 20), 2.0, 0.8).diff() < 0).all()


def test_every_round_has_its_own_cap():
    """A vector of caps gives what each cap gives alone."""
    h, caps = torch.tensor([0.1, 0.9, 0.9, 3.0]), torch.tensor([15, 2, 15, 0])
    alone = [float(expected_accepted(h[i : i + 1], 1.0, 0.5, int(caps[i]))) for i in range(4)]
    assert expected_accepted(h, 1.0, 0.5, caps).tolist() == pytest.approx(alone)


def test_no_rounds_no_numbers():
    """An empty set of rounds gives an empty answer."""
    assert expected_accepted(torch.zeros(0), 1.0, 0.5, torch.zeros(0, dtype=torch.long)).shape == (0,)


# ---- the fit ----


def test_fit_recovers_a_planted_law():
    """400 noisy rounds with caps, twenty times: b0 and b1 are near, and the 95 % interval holds the planted b1 most times."""
    fits = [fit_entropy_law(*simulate(seed)) for seed in range(20)]
    assert sum(f.interval[0] <= 0.8 <= f.interval[1] for f in fits) >= 16
    assert sum(f.identified for f in fits) >= 18
    assert sum(f.b0 for f in fits) / 20 == pytest.approx(1.5, abs=0.15) and sum(f.b1 for f in fits) / 20 == pytest.approx(0.8, abs=0.1)
    assert all(f.interval[1] - f.interval[0] < 0.8 for f in fits)  # an interval of everything would hold b1 too


def test_exact_rounds_give_the_law_exactly():
    """Without noise (a = E[a | H]) the planted coefficients come back."""
    h, _, cap = simulate(0)
    fit = fit_entropy_law(h, expected_accepted(h, 1.5, 0.8, cap), cap)
    assert (fit.b0, fit.b1, fit.r2_deciles) == pytest.approx((1.5, 0.8, 1.0), abs=1e-2)


def test_ignoring_the_caps_is_caught():
    """Fitted as if every round could have accepted 15, the same rounds give another law."""
    h, accepted, cap = simulate(0, rounds=600)
    assert abs(fit_entropy_law(h, accepted, 15).b0 - 1.5) > 2 * abs(fit_entropy_law(h, accepted, cap).b0 - 1.5)


def test_a_law_predicts_and_prints():
    """predict is E[a | H] at the fitted coefficients, and the line names both, the interval and the rounds."""
    fit = fit_entropy_law(*simulate(0))
    assert torch.equal(fit.predict(torch.tensor([0.5, 1.0]), 4), expected_accepted(torch.tensor([0.5, 1.0]), fit.b0, fit.b1, 4))
    assert all(part in str(fit) for part in (f"b0 = {fit.b0:.2f}", f"b1 = {fit.b1:.2f}", "400 rounds", "R^2"))


# ---- what must not be believed ----


def test_shuffled_entropy_identifies_nothing():
    """H dealt out to other rounds explains nothing: b1's interval spans 0, but for the one time in twenty it may not."""
    missed = 0
    for seed in range(12):
        h, accepted, cap = simulate(seed)
        fit = fit_entropy_law(h[torch.randperm(len(h), generator=torch.Generator().manual_seed(seed))], accepted, cap)
        missed += fit.identified
    assert missed <= 2


def test_few_rounds_identify_nothing():
    """299 rounds of a clear law are not enough, 300 are."""
    h, accepted, cap = simulate(1)
    assert [fit_entropy_law(h[:n], accepted[:n], cap[:n]).identified for n in (299, 300)] == [False, True]


@pytest.mark.parametrize("entropy", [0.0, 0.3, 1.0, 1.7])
def test_one_value_of_entropy_identifies_nothing(entropy):
    """With H constant only b0 - b1 H is known: any b1 will do, so none may be claimed."""
    fit = fit_entropy_law(*simulate(0, entropy=entropy))
    assert math.isfinite(fit.b0) and math.isfinite(fit.b1) and not fit.identified and "not identified" in str(fit)


@pytest.mark.parametrize("kind", ["all at 15", "all at their own cap", "none accepted", "always four of four", "always four of fifteen"])
def test_rounds_that_are_all_alike_identify_nothing(kind):
    """A drafter that is always right or always wrong says nothing about H; the fit neither crashes nor claims a slope."""
    h, _, cap = simulate(0)
    accepted, cap = {"all at 15": (cap * 0 + 15, 15), "all at their own cap": (cap, cap), "none accepted": (cap * 0, cap),
                     "always four of four": (cap * 0 + 4, 4), "always four of fifteen": (cap * 0 + 4, 15)}[kind]  # fmt: skip
    fit = fit_entropy_law(h, accepted, cap)
    assert math.isfinite(fit.b0) and math.isfinite(fit.b1) and not fit.identified


@pytest.mark.parametrize("h, accepted", [([1.0, 2.0], [1, 2]), ([], []), ([1.0, 2.0, 3.0], [1, 2]), ([[1.0] * 4], [[1] * 4])], ids=str)
def test_too_few_or_unequal_rounds(h, accepted):
    """An error that shows both shapes."""
    with pytest.raises(ValueError, match="at least 3 rounds"):
        fit_entropy_law(torch.tensor(h), torch.tensor(accepted))


# ---- R^2 on deciles ----


def test_r2_by_hand():
    """Two bins in the order of H: means 3 and 1 against fitted 2 and 1, so R^2 = 1 - 1 / 2."""
    h, actual, fitted = torch.tensor([[2.0, 0.0, 3.0, 1.0], [1.0, 4.0, 1.0, 2.0], [1.5, 2.5, 0.5, 1.5]])
    assert r2_on_deciles(h, actual, fitted, bins=2) == pytest.approx(0.5)


def test_r2_reads_bin_means():
    """Ten bins of ten: scatter inside a decile costs nothing, a decile that is off costs its square."""
    h = torch.arange(100.0)[torch.randperm(100, generator=torch.Generator().manual_seed(0))]
    decile = (h // 10).double()
    scatter = torch.where(h % 2 == 0, 1.0, -1.0)  # averages out in each decile
    assert r2_on_deciles(h, decile + scatter, decile) == pytest.approx(1)
    off = decile + (decile == 4)
    assert r2_on_deciles(h, decile, off) == pytest.approx(1 - 1 / 82.5)  # spread of 0 ... 9 is 82.5


def test_r2_of_a_flat_curve_is_undefined():
    """Nothing to explain: not a number, rather than a perfect fit."""
    assert math.isnan(r2_on_deciles(torch.arange(20.0), torch.ones(20), torch.ones(20)))


def test_one_odd_round_identifies_nothing():
    """One accepted draft in 400 rounds has a tiny formal interval; it must not be believed. Thousands of rounds stay quick."""
    h, accepted, cap = simulate(0)
    one = torch.zeros_like(accepted)
    one[7] = 1
    assert not fit_entropy_law(h, one, 15).identified
    began = time.perf_counter()
    assert fit_entropy_law(*simulate(1, rounds=20_000)).identified
    assert time.perf_counter() - began < 20  # one backward pass, not one for every round
