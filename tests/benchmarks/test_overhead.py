"""What `watch` costs is counted from pairs of epochs; what other tools say is read from their
output.
"""

from benchmarks.causes.peers import read_gpuprof, read_traceml
from benchmarks.overhead import ClockedLoader, find_costs, tabulate


def make_row(bare_s, watched_s, outside_s, threads_s):
    bare = {"wall_s": bare_s, "outside_s": 0.0, "threads_s": 0.0}
    return {
        "workers": 0,
        "bare": bare,
        "watched": {"wall_s": watched_s, "outside_s": outside_s, "threads_s": threads_s},
    }


def test_costs_are_shares_of_the_bare_epoch():
    assert find_costs(make_row(10.0, 11.0, 0.02, 0.03)) == (0.005, 0.10000000000000009)
    assert "+0.50%" in tabulate([make_row(10.0, 11.0, 0.02, 0.03)])
    assert tabulate([]) == "nothing was timed"


def test_a_clocked_loader_gives_the_same_batches_and_adds_up_its_time():
    loader = ClockedLoader(range(8), batch_size=4)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert loader.inside_s > 0


def test_verdict_and_advice_of_traceml():
    said = (
        "|  Verdict: INPUT-BOUND  (CRITICAL)   |\n|  Why: it waits.  |\n|  Next: Increase "
        "workers.   |\n"
    )
    assert read_traceml(said) == ("INPUT-BOUND  (CRITICAL)", "Increase workers.")
    assert read_traceml("") == ("", "")


def test_the_first_insight_of_gpuprof_counts():
    # after a run: without advice
    said = "  Insights (2):\n  [HIGH]  the loader is slow\n  [LOW]   it costs money\n"
    said += "  [HIGH]  the loader is slow\n          Use more workers,\n          or fewer.\n"
    said += "  [LOW]   it costs money\n          Pay less.\n"
    assert read_gpuprof(said) == ("the loader is slow", "Use more workers, or fewer.")
    assert read_gpuprof("") == ("", "")
