"""The end of a worker process, in words."""

from colab_utils.loading.workers import describe_exit, explain_death
from colab_utils.machine import count_oom_kills


def test_a_bus_error_is_explained_by_its_two_causes():
    message = explain_death(describe_exit(-7), 0)
    assert "A mapped file (a numpy memmap, an LMDB) became shorter" in message
    assert "/dev/shm was full" in message
    assert "memory ran out" not in message


def test_want_of_memory_is_named_where_the_system_counted_it():
    ending = describe_exit(-9)
    kills = count_oom_kills()
    assert "What killed it is not known" in explain_death(ending, kills)
    text = explain_death(ending, kills - 1)
    assert "ended a process because memory ran out: use fewer workers" in text
