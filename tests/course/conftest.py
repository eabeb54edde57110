"""The comparison with round numbers of ``tests/show``."""

from tests.show.conftest import course, lose, make_comparison, make_timing

__all__ = ["course", "lose", "make_comparison", "make_timing"]
