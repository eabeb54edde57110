"""The race of ways of loading: every strategy on the same work, checked for equality first."""
