"""The judge of the soak, on series whose growth is known."""

import random

import pytest

from support.growth import find_growth, format_table, measure_growth


def make_noise(count, size, seed=0):
    generator = random.Random(seed)
    return [generator.gauss(0, size) for _ in range(count)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("count", [40, 300])
def test_noise_does_not_grow(count, seed):
    values = [300 + noise for noise in make_noise(count, 5, seed)]
    steps = [noise + 20 for noise in make_noise(count, 6, seed)]
    assert find_growth({"rank MB": values, "CPU of a step by machine": steps}) == {}


def test_what_is_only_shown_is_not_judged():
    assert find_growth({"CPU ms per step": [float(number) for number in range(40)]}) == {}


def test_outliers_do_not_count():
    values = [300.0 + (500 if number % 9 == 0 else 0) for number in range(100)]
    assert measure_growth(values) == 0


@pytest.mark.parametrize("count", [40, 300])
def test_a_leak_within_noise(count):
    leak = [300 + 30 * number / count + noise for number, noise in enumerate(make_noise(count, 3))]
    growth = find_growth({"rank MB": leak})["rank MB"]
    assert 0.75 * 30 * 0.7 < growth < 0.75 * 30 * 1.3


def test_a_descriptor_that_leaks_in_every_tenth_fit():
    assert "descriptors" in find_growth({"descriptors": [40.0 + number // 10 for number in range(80)]})
    assert "descriptors" in find_growth({"descriptors": [40.0 + number // 40 for number in range(300)]})


def test_counts_that_go_up_and_down():
    generator = random.Random(0)
    assert find_growth({"threads": [12.0 + generator.randrange(3) for _ in range(200)]}) == {}


def test_a_warm_up_is_no_growth():
    warm = [100.0 + 200 * min(1, number / 20) for number in range(100)]
    assert find_growth({"rank MB": warm}) == {}


def test_one_jump_is_no_growth():
    assert find_growth({"threads": [12.0] * 50 + [13.0] * 50}) == {}


def test_steps_that_become_slower():
    slower = [20 * (1 + number / 100) + noise for number, noise in enumerate(make_noise(100, 3))]
    assert "CPU of a step by machine" in find_growth({"CPU of a step by machine": slower})


def test_too_few_samples():
    with pytest.raises(ValueError, match="run longer"):
        measure_growth([1.0] * 9)


def test_the_table_has_a_column_per_minute():
    minutes = [number / 10 for number in range(30)]
    table = format_table("rank 0", minutes, {"threads": [float(int(minute)) for minute in minutes]})
    assert table.splitlines()[0] == "rank 0: 30 samples"
    assert table.splitlines()[2].split()[:4] == ["threads", "0", "1", "2"]
