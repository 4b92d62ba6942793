"""AdvancedProfiler counts functions."""

import pickle
import pstats

from treadle.profilers import AdvancedProfiler


def test_advanced_counts_each_function_once_where_it_is_called(tmp_path):
    profiler = AdvancedProfiler(tmp_path, dump_stats=True)

    def inner():
        pass

    with profiler.profile("outer"):
        for _ in range(2):
            with profiler.profile("inner"):
                inner()
    assert "Profile of outer" in profiler.summary()
    functions = {
        name: {key[2]: calls[0] for key, calls in pstats.Stats(str(tmp_path / f"{name}.prof")).stats.items()}
        for name in ("outer", "inner")
    }
    assert functions["inner"]["inner"] == 2
    assert "inner" not in functions["outer"]
    pickle.dumps(AdvancedProfiler())


def test_a_restriction_outside_of_its_range_shows_all_functions_as_in_lightning():
    lengths = []
    for restriction in (1, 2.0):
        profiler = AdvancedProfiler(line_count_restriction=restriction)
        with profiler.profile("sort"):
            sorted(range(9), key=lambda number: -number)
        lengths.append(len(profiler.summary().splitlines()))
    assert lengths[0] < lengths[1]
